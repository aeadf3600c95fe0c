"""From a container of a pod's spec to the program that this machine runs for it."""

from pathlib import Path

from ddpjob.api import names
from ddpjob.cluster.base import Json
from ddpjob.local import cpus, environment, gpus
from ddpjob.local.container import Program
from ddpjob.local.expand import expand
from ddpjob.local.machine import Machine
from ddpjob.local.sources import ConfigError
from ddpjob.local.translate import Translator
from ddpjob.local.volumes import Volumes

ENTRYPOINT = "ddptrain"
"""What the project's own trainer image runs; other images are not read."""


def program_of(pod: Json, container: Json, machine: Machine, volumes: Volumes) -> Program:
    """What to start. Raises ``ConfigError`` for what cannot be resolved."""
    name, meta = container["name"], pod["metadata"]
    variables = environment.declared(pod, container, machine.sources)
    message = message_file(machine, meta["name"], name)
    message.touch()
    paths = volumes.paths(container, variables.values) | {container["terminationMessagePath"]: str(message)}
    translator = Translator(
        pod=meta["name"],
        service=pod["spec"].get("subdomain", ""),
        namespace=meta["namespace"],
        domain=machine.domain,
        port_of=machine.ports.of,
        paths=paths,
    )
    words = [*(container.get("command") or _entrypoint(name)), *(container.get("args") or ())]
    rank = int((meta.get("labels") or {}).get(names.LABEL_NODE_RANK, 0))
    devices = gpus.share(machine.gpus, rank, gpus.wanted(container))
    return Program(
        words=translator.words(expand(word, variables.values) for word in words),
        environment=environment.complete(pod, variables, translator, message, devices),
        directory=machine.directory / translator.text(container.get("workingDir") or "."),
        cpus=cpus.share(machine.available, rank, machine.nodes, cpus.limit_of(pod)),
        log=machine.folder.log(meta["name"], name),
    )


def message_file(machine: Machine, pod: str, container: str) -> Path:
    """Where a container's termination message is, in place of its terminationMessagePath."""
    return machine.folder.pod(pod) / f"{container}.termination-log"


def _entrypoint(container: str) -> list[str]:
    if container == names.TRAINER_CONTAINER:
        return [ENTRYPOINT]
    raise ConfigError(f"container {container} names no command, and images, which would, are not read on this machine")
