"""One pod as a process of this machine, under a supervisor (``shim``) that leaves none of its processes behind."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.exit_codes import SIGNAL_BASE
from ddpjob.api.log_failure import SEARCHED_BYTES, LogFailure, log_failure
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.injection import PROGRAM
from ddpjob.local import LocalError
from ddpjob.local.environment import declared, expand, inherited
from ddpjob.local.references import NO_REFERENCES, References
from ddpjob.local.resources import Ports, available_cpus, cpu_share, gpu_variables, visible_gpus
from ddpjob.local.state import HostPaths
from ddpjob.local.translate import LOOPBACK, Translator
from ddpjob.local.volumes import Volumes

ENTRYPOINT = "ddptrain"
"""Entrypoint of the project's trainer image; other images are not inspected."""
PRIVATE = "volumes"
"""Folder of the volumes that belong to one pod, Secrets among them; it is removed when the pod has ended."""
_DDPRUN = str(Path(sys.executable).with_name("ddprun"))
"""What a cluster's pods have at ``PROGRAM`` with ``launcher: Injected``."""
_SHIM = Path(__file__).with_name("shim.py")
_MESSAGE_BYTES = 4096
_LOG_BYTES, _LOG_LINES = 2048, 80


@dataclass(frozen=True)
class Machine:
    """This machine, as the pods of a job use it: they share its CPUs equally, and its GPUs as far as they request them.

    references: Secrets and ConfigMaps that the pods may refer to.
    directory: where programs without workingDir run; an absolute path.
    """

    paths: HostPaths
    references: References = NO_REFERENCES
    directory: Path = field(default_factory=Path.cwd)
    ports: Ports = field(default_factory=Ports)
    cpus: Sequence[int] = field(default_factory=available_cpus)
    gpus: Sequence[str] = field(default_factory=visible_gpus)

    @property
    def place(self) -> Json:
        """What the record keeps, so that the job can be resumed from another directory."""
        volumes = {claim: str(path) for claim, path in self.paths.volumes.items()}
        return {"directory": str(self.directory), "volumes": volumes}


class PodProcess:
    """A pod that runs.

    pod: the pod as an API server would return it, with as much of its status as is read. on_change: called after each
    change of it, and when ``task`` has ended: then no process of the pod is left. logged: what its log says about its
    failure, after it ended.

    Raises:
        LocalError: local mode cannot carry out this pod.
    """

    task: asyncio.Task[None]

    def __init__(self, pod: Json, machine: Machine, on_change: Callable[[], None]) -> None:
        self.pod = pod
        self._on_change = on_change
        self._folder = machine.paths.record.pod(pod["metadata"]["name"])
        self._log = machine.paths.record.log(pod["metadata"]["name"])
        self._message_file = self._folder / "trainer.termination-log"
        self._volumes = Volumes(pod["spec"], self._folder / PRIVATE, machine.references, machine.paths.claim)
        self._program = _program(pod, machine, self._volumes, self._message_file)
        self._orders: asyncio.StreamWriter | None = None
        self._is_killed = False
        self.logged: LogFailure | None = None
        self._set("Pending", {"waiting": {"reason": "ContainerCreating"}})

    def start(self) -> None:
        """Start the pod; ``task`` runs until none of its processes is left."""
        self.task = asyncio.create_task(self._run(), name=self._folder.name)
        self.task.add_done_callback(lambda _: self._on_change())

    async def _run(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a run that was killed before it recorded this pod
        self._folder.mkdir(parents=True)
        self._message_file.touch()
        begin = timestamp(datetime.now(UTC))
        try:
            self._volumes.prepare()
            code = await self._run_shim(begin)
        finally:
            shutil.rmtree(self._folder / PRIVATE, ignore_errors=True)
        self.logged = log_failure(_end_of(self._log, SEARCHED_BYTES)) if code else None
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": self._message(code)}
        times = {"startedAt": begin, "finishedAt": timestamp(datetime.now(UTC))}
        self._set("Failed" if code else "Succeeded", {"terminated": ended | times})

    def stop(self) -> None:
        """Send SIGTERM to the main process, and SIGKILL to all processes after the pod's grace period."""
        grace = int(self.pod["spec"]["terminationGracePeriodSeconds"])
        deadline = timestamp(datetime.now(UTC) + timedelta(seconds=grace))
        self.pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": grace}
        self._send(bytes([signal.SIGTERM]))
        asyncio.get_running_loop().call_later(grace, self.kill)

    def kill(self) -> None:
        """Kill all processes."""
        self._is_killed = True
        if self._orders is not None:
            self._orders.close()

    async def _run_shim(self, begin: str) -> int:
        """Run the program. Return its exit code, 128 + n for signal n, when no process is left."""
        with self._log.open("ab") as log:
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM)),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C at the terminal reaches only the run
            )
        self._orders = shim.stdin
        self._send(json.dumps(self._program).encode() + b"\n")
        if self._is_killed:
            self.kill()
        elif "deletionTimestamp" in self.pod["metadata"]:
            self._send(bytes([signal.SIGTERM]))
        self._set("Running", {"running": {"startedAt": begin}})
        code = await shim.wait()
        return code if code >= 0 else SIGNAL_BASE + signal.SIGKILL  # the shim was killed, and with it its child

    def _send(self, order: bytes) -> None:
        if self._orders is not None and not self._orders.is_closing():
            self._orders.write(order)

    def _set(self, phase: str, state: Json) -> None:
        trainer = {"name": names.TRAINER_CONTAINER, "state": state}
        address = {} if phase == "Pending" else {"podIP": LOOPBACK}
        self.pod["status"] = {"phase": phase, **address, "containerStatuses": [trainer]}
        self._on_change()

    def _message(self, code: int) -> str:
        """Return the end of the message file; if that is empty and the trainer failed, the end of its log.

        https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
        """
        policy = self.pod["spec"]["containers"][0].get("terminationMessagePolicy")
        text = _end_of(self._message_file, _MESSAGE_BYTES)
        if text or not code or policy != "FallbackToLogsOnError":
            return text
        return "".join(_end_of(self._log, _LOG_BYTES).splitlines(keepends=True)[-_LOG_LINES:])


def _program(pod: Json, machine: Machine, volumes: Volumes, message_file: Path) -> Json:
    """Return what the shim starts: command, environment, directory and CPUs."""
    spec, meta = pod["spec"], pod["metadata"]
    others = [c["name"] for c in (*(spec.get("initContainers") or ()), *spec["containers"][1:])]
    if others:
        raise LocalError(
            f"local mode runs only the container trainer, and spec.template has {', '.join(others)}",
            "sidecars and init containers usually need the images and the network of a cluster",
            "remove them (--set template=null removes the template), or run the job in a cluster",
        )
    name, trainer = meta["name"], spec["containers"][0]
    rendezvous, progress = machine.ports.of(name.rpartition("-")[0]), machine.ports.of(name)
    ports = {"MASTER_PORT": rendezvous, "PET_MASTER_PORT": rendezvous, names.ENV_PROGRESS_PORT: progress}
    variables, secret = declared(trainer, machine.references, ports)
    message_path = str(trainer.get("terminationMessagePath") or "/dev/termination-log")
    translator = Translator(
        service=spec["subdomain"],
        namespace=meta["namespace"],
        domain=EngineSettings().cluster_domain,
        paths=volumes.paths | {message_path: str(message_file), PROGRAM: _DDPRUN},
    )
    rank = int(meta["labels"][names.LABEL_NODE_RANK])
    job = machine.paths.job
    own = {"HOSTNAME": name, "DDPJOB_TERMINATION_LOG": str(message_file)}
    # In a cluster all pods have the same number; here the launchers need to know that of node 0.
    own |= {names.ENV_LEADER_PORT: str(machine.ports.of(f"{name.rpartition('-')[0]}-0"))}
    nodes, requested = job.spec.num_nodes, job.spec.devices_per_node
    own |= gpu_variables(machine.gpus, rank, nodes, requested=requested, processes=job.nproc_per_node)
    theirs = {key: value if key in secret else translator.text(value) for key, value in variables.items()}
    command = [*(trainer.get("command") or [ENTRYPOINT]), *(trainer.get("args") or ())]
    cpu_limit = ((trainer.get("resources") or {}).get("limits") or {}).get("cpu")
    return {
        "command": [translator.text(expand(part, variables)) for part in command],
        "environment": inherited() | own | theirs,
        "directory": str(machine.directory / translator.text(trainer.get("workingDir") or ".")),
        "cpus": cpu_share(machine.cpus, rank, nodes, cpu_limit),
    }


def _end_of(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""
