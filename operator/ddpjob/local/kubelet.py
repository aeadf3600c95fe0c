"""The kubelet of local mode: binds the pods of the in-memory cluster to this machine and runs their containers."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cluster.base import NotFound
from ddpjob.cluster.memory import ApiServer, MemoryCluster
from ddpjob.local import environment, pod_status
from ddpjob.local.container import Container, Exit, Program, StartError
from ddpjob.local.references import ConfigError, References, expand
from ddpjob.local.resources import Ports, cpu_limit, cpu_share, gpu_limit, gpu_share
from ddpjob.local.state import JobFolder
from ddpjob.local.translate import LOOPBACK, Translator
from ddpjob.local.volumes import Volumes

NODE_NAME = "local"
_START_ERROR = 128  # the exit code of a container that could not start, as with containerd
ENTRYPOINT = "ddptrain"
"""Entrypoint of the project's trainer image; other images are not inspected."""


@dataclass(frozen=True)
class Machine:
    """This machine, as the pods use it.

    claim_directory: returns the directory of a claim. directory: where containers without workingDir run.
    nodes: number of pods of an attempt; they share the CPUs in ``available`` equally and ``gpus`` by their limits.
    """

    server: ApiServer
    folder: JobFolder
    references: References
    ports: Ports
    claim_directory: Callable[[str], Path]
    directory: Path
    domain: str
    nodes: int
    available: Sequence[int]
    gpus: Sequence[str] = ()


class Kubelet:
    """Runs every pod of ``cluster``; cancelling ``run`` kills what runs before it returns.

    on_end: called when a pod has ended.
    """

    def __init__(self, cluster: MemoryCluster, machine: Machine, on_end: Callable[[], None]) -> None:
        self._cluster = cluster
        self._machine = machine
        self._on_end = on_end
        # By uid, never removed: a late event of a pod that has ended must not start it again.
        self._runs: dict[str, tuple[PodRun, asyncio.Task[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any pod has a process or is about to start one."""
        return any(not task.done() for _, task in self._runs.values())

    async def run(self) -> None:
        """Run pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for event in self._cluster.watch(names.PODS):
                self._see(event["type"], event["object"], group)

    def _see(self, change: str, pod: Json, group: asyncio.TaskGroup) -> None:
        meta = pod["metadata"]
        known = self._runs.get(meta["uid"])
        if known is None:
            if change != "DELETED" and "deletionTimestamp" not in meta and not is_over(pod):
                run = PodRun(pod, self._machine)
                task = group.create_task(run.run(), name=f"pod {meta['name']}")
                task.add_done_callback(lambda _: self._on_end())
                self._runs[meta["uid"]] = run, task
            return
        run, _ = known
        if change == "DELETED":
            run.stop(0.0)
        elif "deletionTimestamp" in meta:
            run.stop(float(meta.get("deletionGracePeriodSeconds") or 0))


def is_over(pod: Json) -> bool:
    """Return whether all containers of a pod have ended."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class PodRun:
    """Runs one pod. Cancelling ``run`` kills all its processes before ``run`` returns."""

    def __init__(self, pod: Json, machine: Machine) -> None:
        self._machine = machine
        self._namespace: str = pod["metadata"]["namespace"]
        self._name: str = pod["metadata"]["name"]
        self._folder = machine.folder.pod(self._name)
        # As containers see it; the stored object gets these fields from binding and from its status.
        where = {"hostIP": LOOPBACK, "podIP": LOOPBACK, "hostIPs": [{"ip": LOOPBACK}], "podIPs": [{"ip": LOOPBACK}]}
        self._pod: Json = pod | {"spec": pod["spec"] | {"nodeName": NODE_NAME}, "status": where}
        self._volumes = Volumes(self._pod, self._folder, machine.references, machine.claim_directory)
        self._inits: list[Json] = pod["spec"].get("initContainers") or []
        self._mains: list[Json] = pod["spec"]["containers"]
        reason = "PodInitializing" if self._inits else "ContainerCreating"
        self._states = {c["name"]: pod_status.waiting(reason) for c in (*self._inits, *self._mains)}
        self._running: dict[str, Container] = {}
        self._sidecars: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._is_killed = False
        self._killer: asyncio.TimerHandle | None = None
        self._start = datetime.now(UTC)

    def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds; a second call can only shorten that time.

        Sidecars get SIGTERM when the other containers have ended.
        """
        loop = asyncio.get_running_loop()
        if not self._stopping.is_set():
            self._stopping.set()
            sidecars = {container["name"] for container in self._inits if pod_status.is_sidecar(container)}
            for name, container in self._running.items():
                if name not in sidecars:
                    container.signal(signal.SIGTERM)
        if self._killer is None or self._killer.when() > loop.time() + grace:
            if self._killer is not None:
                self._killer.cancel()
            self._killer = loop.call_later(grace, self._kill)

    async def run(self) -> None:
        """Run the pod until every container has ended and, if the pod was deleted, its object is removed."""
        try:
            self._machine.server.bind(self._namespace, self._name, NODE_NAME)
        except NotFound:
            return
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a run that was killed before it recorded this pod
        self._folder.mkdir(parents=True)
        life = asyncio.create_task(self._live(), name=f"life of {self._name}")
        try:
            await asyncio.shield(life)
        except asyncio.CancelledError:
            self._kill()
            await life
            raise
        self._confirm_deletion()

    async def _live(self) -> None:
        try:
            self._volumes.prepare()
            self._report()
            await self._run_containers()
        except ConfigError as error:
            await self._stay_unready(self._mains[0]["name"], error)
        finally:
            await self._end_sidecars()
            self._volumes.clean_up()

    async def _run_containers(self) -> None:
        for container in self._inits:
            if pod_status.is_sidecar(container):
                await self._start_sidecar(container)
            else:
                await self._run_container(container)
            if self._stopping.is_set() or pod_status.exit_code(self._states[container["name"]]):
                return
        await asyncio.gather(*(self._run_container(container) for container in self._mains))

    async def _start_sidecar(self, container: Json) -> None:
        """Start a sidecar, which runs until the containers have ended; if it ends by itself, it is not restarted."""
        started = asyncio.Event()
        task = asyncio.create_task(self._run_container(container, started), name=f"{self._name}/{container['name']}")
        self._sidecars.add(task)
        task.add_done_callback(lambda _: started.set())
        await started.wait()

    async def _run_container(self, container: Json, started: asyncio.Event | None = None) -> None:
        name = container["name"]
        try:
            program = program_of(self._pod, container, self._machine, self._volumes)
        except ConfigError as error:
            await self._stay_unready(name, error)
            return
        begin = datetime.now(UTC)
        try:
            process = await Container.start(program)
        except StartError as error:
            self._set(name, pod_status.terminated(_START_ERROR, "StartError", str(error), None, datetime.now(UTC)))
            return
        self._running[name] = process
        if self._stopping.is_set():
            process.signal(signal.SIGKILL if self._is_killed else signal.SIGTERM)
        self._set(name, pod_status.running(begin))
        if started is not None:
            started.set()
        ended = await process.wait()
        del self._running[name]
        self._set(name, self._terminated(container, ended, begin))

    def _terminated(self, container: Json, ended: Exit, begin: datetime) -> Json:
        name = container["name"]
        falls_back = container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and ended.code != 0
        file, log = message_file(self._machine, self._name, name), self._machine.folder.log(self._name, name)
        message = pod_status.termination_message(file, log, falls_back=falls_back)
        return pod_status.terminated(ended.code, "Error" if ended.code else "Completed", message, begin, ended.at)

    async def _stay_unready(self, name: str, error: ConfigError) -> None:
        """Report the error and wait for the pod's deletion: nothing else can resolve it, as the file is read once."""
        self._set(name, pod_status.waiting("CreateContainerConfigError", str(error)))
        await self._stopping.wait()

    async def _end_sidecars(self) -> None:
        """Stop the sidecars; when this returns, no process of the pod is left."""
        if self._running and not self._stopping.is_set():
            self.stop(float(self._pod["spec"].get("terminationGracePeriodSeconds", 30)))
        for container in self._running.values():
            container.signal(signal.SIGTERM)
        await asyncio.gather(*self._sidecars)
        if self._killer is not None:
            self._killer.cancel()

    def _kill(self) -> None:
        self._is_killed = True
        self._stopping.set()
        for container in self._running.values():
            container.kill()

    def _set(self, container: str, state: Json) -> None:
        self._states[container] = state
        self._report()

    def _report(self) -> None:
        server = self._machine.server
        with contextlib.suppress(NotFound):  # the pod was deleted by force
            stored = server.get(names.PODS, self._namespace, self._name)
            if stored["metadata"]["uid"] == self._pod["metadata"]["uid"]:
                status = pod_status.pod_status(stored, self._states, self._start, datetime.now(UTC))
                server.patch_status(names.PODS, self._namespace, self._name, {"status": status})

    def _confirm_deletion(self) -> None:
        server, uid = self._machine.server, self._pod["metadata"]["uid"]
        with contextlib.suppress(NotFound):
            stored = server.get(names.PODS, self._namespace, self._name)
            if stored["metadata"]["uid"] == uid and "deletionTimestamp" in stored["metadata"]:
                server.delete(names.PODS, self._namespace, self._name, uid=uid, grace_seconds=0)


def program_of(pod: Json, container: Json, machine: Machine, volumes: Volumes) -> Program:
    """Return the program to start for a container. Raises ``ConfigError`` for a value that cannot be resolved."""
    name, meta = container["name"], pod["metadata"]
    variables = environment.declared(pod, container, machine.references)
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
    command = [*(container.get("command") or _entrypoint(name)), *(container.get("args") or ())]
    rank = int((meta.get("labels") or {}).get(names.LABEL_NODE_RANK, 0))
    devices = gpu_share(machine.gpus, rank, gpu_limit(container))
    return Program(
        command=translator.command(expand(argument, variables.values) for argument in command),
        environment=environment.complete(pod, variables, translator, message, devices),
        directory=machine.directory / translator.text(container.get("workingDir") or "."),
        cpus=cpu_share(machine.available, rank, machine.nodes, cpu_limit(pod)),
        log=machine.folder.log(meta["name"], name),
    )


def message_file(machine: Machine, pod: str, container: str) -> Path:
    """Return the file that replaces a container's terminationMessagePath."""
    return machine.folder.pod(pod) / f"{container}.termination-log"


def _entrypoint(container: str) -> list[str]:
    if container == names.TRAINER_CONTAINER:
        return [ENTRYPOINT]
    raise ConfigError(f"container {container} has no command, and local mode does not read the entrypoint of images")
