"""One ``ddpjob run``, from the admitted job to the finished or suspended one.

The session does what a user does (it creates, suspends and resumes the job) and runs the controller and the kubelet.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddpjob.cluster.base import NotFound
from ddpjob.cluster.clock import SteadyClock
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.controller.controller import Controller
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.progress import ProgressPoller
from ddpjob.engine.actions import EngineSettings
from ddpjob.local import LocalError, resume
from ddpjob.local.admission import AdmittedJob
from ddpjob.local.kubelet import Kubelet, Machine, is_over
from ddpjob.local.references import References
from ddpjob.local.resources import Ports, visible_gpus
from ddpjob.local.state import StateFolder
from ddpjob.local.volumes import sweep_shared_memory

_PAUSE_SECONDS = 0.1
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOGS_COMMAND = "ddpjob logs {job} --node {node_rank} --attempt {attempt}"


@dataclass(frozen=True)
class Options:
    """How to run the job.

    fresh: first remove the job's record and empty the volume of its claimTemplate.
    volumes: claim name to an existing directory of this machine that replaces the one in the state folder.
    progress_seconds: time between two progress requests to rank 0.
    directory: where containers without a workingDir run; None is the current directory.
    """

    fresh: bool = False
    volumes: Mapping[str, Path] = field(default_factory=dict)
    progress_seconds: float = 0.25
    directory: Path | None = None


class Session:
    """Runs one job.

    others: Secrets and ConfigMaps that the pods may refer to.
    on_change: called with the DDPJob and its pods at the start and after every change, at most ten times a second.
    say: prints one line for the user; the line has no line feed.
    job: the DDPJob as it was last seen. cluster: the API server of this run.

    Raises:
        LocalError: a Secret cannot be read.
    """

    def __init__(
        self,
        admitted: AdmittedJob,
        others: Sequence[Json],
        folder: StateFolder,
        options: Options,
        *,
        on_change: Callable[[Json, Sequence[Json]], None],
        say: Callable[[str], None],
    ) -> None:
        self._admitted = admitted
        self._namespace, self._name = admitted.job.namespace, admitted.job.name
        self._references = References(others, self._namespace)
        self._state = folder
        self._folder = folder.job(self._namespace, self._name)
        self._options = options
        self._on_change = on_change
        self._say = say
        self.cluster = MemoryCluster()
        self.job = admitted.body
        self._changed = asyncio.Event()
        self._clock = SteadyClock()
        self._killed_at: datetime | None = None

    async def run(self, stop: asyncio.Event) -> Json:
        """Run until the job is finished, or suspended by ``stop`` or by its own spec. Return the DDPJob.

        Cancelling the call kills all processes at once; the job can still be resumed.

        Raises:
            LocalError: another process runs this job, or the state folder or a volume cannot be used.
        """
        _require_linux()
        try:
            with self._folder.locked(), _log_to_file(self._folder.path):
                return await self._run(stop)
        except OSError as error:
            raise LocalError(
                f"{error.filename or self._state.root}: {error.strerror or error}",
                "local mode keeps its state and the job's volumes there",
                "free space or fix the permissions, or name another folder with --state-dir or DDPJOB_STATE_DIR",
            ) from error

    async def _run(self, stop: asyncio.Event) -> Json:
        sweep_shared_memory()
        if self._options.fresh:
            resume.remove_state(self._folder, self._state, self._admitted, self._options.volumes, self._say)
        begin = resume.start_or_resume(self.cluster, self._folder, self._admitted, self._say)
        self._killed_at = begin.killed_at
        resume.explain_differences(self._admitted, self._state, self._options.volumes, self._say)
        spec, settings = self._admitted.job.spec, EngineSettings(delete_finished=False, logs_command=LOGS_COMMAND)
        ports = Ports(rendezvous=spec.rendezvous.port, progress=spec.rendezvous.progress_port)
        controller = Controller(
            self.cluster,
            settings,
            lambda on_news: ProgressPoller(self._options.progress_seconds, on_news, port_of=ports.of),
            metrics=Metrics(),
            now=self._now,
        )
        kubelet = Kubelet(self.cluster, self._machine(ports, spec.num_nodes, settings), self._changed.set)
        try:
            await _run_with_background(
                self._follow(stop, begin.suspend, controller, kubelet),
                # Cancelled in this order: the controller must not judge pods that are being killed.
                controller.serve(self.cluster.watch),
                kubelet.run(),
                self._watch(names.DDPJOBS),
                self._watch(names.PODS),
                self._wake_on(stop),
            )
        finally:
            self._folder.save(self.cluster.dump())
        return self.job

    def _machine(self, ports: Ports, nodes: int, settings: EngineSettings) -> Machine:
        return Machine(
            server=self.cluster.server,
            folder=self._folder,
            references=self._references,
            ports=ports,
            claim_directory=self._claim_directory,
            directory=(self._options.directory or Path.cwd()).absolute(),
            domain=settings.cluster_domain,
            nodes=nodes,
            available=sorted(os.sched_getaffinity(0)),
            gpus=visible_gpus(),
        )

    def _claim_directory(self, claim: str) -> Path:
        given = self._options.volumes.get(claim)
        return given.absolute() if given is not None else self._state.volume(self._namespace, claim)

    def _now(self) -> datetime:
        """Return the time; while the end of a killed run is recorded, the last sign of life of that run."""
        return self._killed_at or self._clock.now()

    async def _follow(self, stop: asyncio.Event, suspend: bool, controller: Controller, kubelet: Kubelet) -> None:
        """Show and save every change; return when the job is finished or suspended and no process runs."""
        while True:
            self._changed.clear()
            self._publish()
            if self._killed_at is not None and (self._is("Suspended") or self._is("Finished")):
                self._killed_at = None
                stays = suspend or stop.is_set()
                self._suspend(stays)
                if not stays and not self._is("Finished"):
                    self._say(resume.resumed(self.job))
            elif stop.is_set() and self._killed_at is None:
                self._suspend(True)
            if self._is_at_rest() and not kubelet.is_busy:
                await controller.flush()
                return
            await asyncio.sleep(_PAUSE_SECONDS)
            await self._changed.wait()

    def _is(self, condition: str) -> bool:
        return is_true(self.job.get("status"), condition)

    def _publish(self) -> None:
        """Write the objects to disk and report them to the user."""
        server = self.cluster.server
        with contextlib.suppress(NotFound):  # if it was deleted, the last state that was seen is the result
            self.job = server.get(names.DDPJOBS, self._namespace, self._name)
        self._folder.save(self.cluster.dump())
        self._on_change(self.job, server.list(names.PODS, self._namespace).items)

    def _suspend(self, suspend: bool) -> None:
        if bool(self.job["spec"].get("suspend")) != suspend and not self._is("Finished"):
            patch = {"spec": {"suspend": suspend}}
            self.job = self.cluster.server.patch(names.DDPJOBS, self._namespace, self._name, patch)

    def _is_at_rest(self) -> bool:
        """Return whether the job is finished or suspended and all pods have ended."""
        suspended = self._killed_at is None and self.job["spec"].get("suspend") and self._is("Suspended")
        pods = self.cluster.store.all(names.PODS, self._namespace)
        return bool(suspended or self._is("Finished")) and all(is_over(pod) for pod in pods)

    async def _watch(self, resource: names.Resource) -> None:
        async for _ in self.cluster.watch(resource):
            self._changed.set()

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()
        await asyncio.Event().wait()  # the end of this task would end the session


async def _run_with_background(main: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end, then cancel the background tasks one after another; raise if one of them ends first."""
    tasks = [asyncio.create_task(work) for work in (main, *background)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group  # the first error cancelled the others
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])


@contextlib.contextmanager
def _log_to_file(folder: Path) -> Iterator[None]:
    """Write the log of package ``ddpjob`` to a new ``controller.log`` only: log lines would disturb a live table."""
    logger = logging.getLogger("ddpjob")
    before = logger.level, logger.propagate
    handler = logging.FileHandler(folder / "controller.log", "w")
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _require_linux() -> None:
    if sys.platform != "linux":
        raise LocalError(
            f"local mode runs on Linux only, this is {sys.platform}",
            "it needs features of the Linux kernel to stop every process of a job",
            "run it in a Linux virtual machine or container, or use a cluster",
        )
