"""A Kubernetes pod template as fields of a DDPJob's spec."""

import copy
import json
import re

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.api.quantities import is_device
from ddpjob.convert.fields import Difference, require_pod_template
from ddpjob.convert.torchrun import Launch, launch
from ddpjob.errors import InvalidJobError

_OF_CONTAINER = ("image", "env", "envFrom", "workingDir", "resources", "imagePullPolicy")
_SHM = "/dev/shm"
_FOREIGN_LABEL = re.compile(r"\b(?:training\.kubeflow\.org|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/[\w-]+")
_OWN_ENV = names.OWNED_ENV | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT"}


def spec_of_pod(
    template: Json, container: str, path: str, notes: list[Difference], *, trainer_path: str = ""
) -> tuple[Json, Launch]:
    """Return the fields of a DDPJob's spec for a pod template, and its command, which is among them.

    Args:
        template: ``metadata`` and ``spec`` of the pods.
        container: name of the container that trains.
        path: of the template in the source, for the notes.
        trainer_path: of command and environment, if they are not in the template.
    """
    template = require_pod_template(copy.deepcopy(template), path)
    pod = present(template.get("spec") or {})
    for label in dict.fromkeys(_FOREIGN_LABEL.findall(json.dumps(pod))):
        why = f"pods of a DDPJob have no label {label}"
        notes.append(Difference(f"{path}.spec", why, f"use {names.LABEL_JOB_NAME} or {names.LABEL_NODE_RANK}"))
    place, trainer, others = _containers(pod, container, f"{path}.spec")
    place = trainer_path or place
    started = launch(trainer.pop("command", []), trainer.pop("args", []), place, notes)
    spec: Json = {key: trainer.pop(key) for key in _OF_CONTAINER if key in trainer}
    spec |= {key: words for key, words in (("command", started.command), ("args", started.args)) if words}
    if "env" in spec:
        spec["env"] = _environment(spec["env"], f"{place}.env", notes)
    if "ports" in trainer:
        trainer["ports"] = [port for port in trainer["ports"] if port.get("name") != "pytorchjob-port"]
    if (shared := _shared_memory(pod, trainer, others, place, notes)) is not None:
        spec["sharedMemory"] = shared
    if "imagePullSecrets" in pod:
        spec["imagePullSecrets"] = pod.pop("imagePullSecrets")
    _replace_what_is_owned(pod, f"{path}.spec", notes)
    # The pods run as the user of their image, as before; the default of a DDPJob is user 1000.
    spec["podSecurity"] = {"profile": "Unset"}
    rest = present({key: value for key, value in trainer.items() if key != "name"})
    containers = [*([{"name": names.TRAINER_CONTAINER} | rest] if rest else []), *others]
    kept = present({"metadata": _metadata(template), "spec": present(pod | {"containers": containers})})
    return present(spec | {"template": kept}), started


def has_devices(resources: Json) -> bool:
    """Return whether a container asks for GPUs."""
    return any(is_device(str(name)) for kind in ("requests", "limits") for name in resources.get(kind) or ())


def _containers(pod: Json, name: str, path: str) -> tuple[str, Json, list[Json]]:
    """Return the path of the container that trains, that container, and the others; they are taken out of the pod."""
    containers = [present(container) for container in pod.pop("containers", [])]
    trainer = element(containers, "name", name) or (containers[0] if len(containers) == 1 else None)
    if trainer is None:
        raise InvalidJobError(
            f"{path}.containers has no container {name}",
            f"it has {', '.join(str(container.get('name')) for container in containers) or 'none'}",
            f"give the container that trains the name {name}",
        )
    return f"{path}.containers[{containers.index(trainer)}]", trainer, [one for one in containers if one is not trainer]


def _environment(env: list[Json], path: str, notes: list[Difference]) -> list[Json]:
    """Return the variables without those that a DDPJob sets."""
    for entry in env:
        if entry.get("name") in _OWN_ENV:
            notes.append(Difference(path, f"{entry['name']} is left out: a DDPJob sets it, or sets what it is for"))
    return [entry for entry in env if entry.get("name") not in _OWN_ENV]


def _shared_memory(pod: Json, trainer: Json, others: list[Json], path: str, notes: list[Difference]) -> Json | None:
    """Take the volume at /dev/shm out of the pod; return it as ``sharedMemory``."""
    mount = element(trainer.get("volumeMounts"), "mountPath", _SHM)
    if not mount:
        return None
    volume = element(pod.get("volumes"), "name", str(mount.get("name")))
    source = volume.get("emptyDir")
    if not isinstance(source, dict) or source.get("medium") != "Memory":
        notes.append(Difference(f"{path}.volumeMounts", f"{_SHM} of a DDPJob is memory, so its volume is left out"))
        source = {}
    trainer["volumeMounts"] = [other for other in trainer["volumeMounts"] if other is not mount]
    containers = (trainer, *others, *pod.get("initContainers", ()))
    used = [used.get("name") for container in containers for used in container.get("volumeMounts") or ()]
    pod["volumes"] = [other for other in pod.get("volumes", ()) if other is not volume or other.get("name") in used]
    return {"sizeLimit": source["sizeLimit"]} if "sizeLimit" in source else None


def _replace_what_is_owned(pod: Json, path: str, notes: list[Difference]) -> None:
    """Remove the fields of a pod that a DDPJob sets, and set what it would set in another way."""
    pod.pop("restartPolicy", None)  # that of the replicas applies
    for key in ("hostname", "subdomain", "setHostnameAsFQDN"):
        if pod.pop(key, None) is not None:
            notes.append(Difference(f"{path}.{key}", "a DDPJob names its pods itself", "use $MASTER_ADDR"))
    account = pod.pop("serviceAccount", None)  # its name in old manifests
    if account is not None:
        pod.setdefault("serviceAccountName", account)
    if "serviceAccountName" in pod:
        pod.setdefault("automountServiceAccountToken", True)


def _metadata(template: Json) -> Json:
    given = template.get("metadata") or {}
    return {key: given[key] for key in ("labels", "annotations") if given.get(key)}


def present(value: Json) -> Json:
    """Return an object without its empty fields."""
    return {key: item for key, item in value.items() if item not in (None, {}, [], "")}
