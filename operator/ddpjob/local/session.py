"""One ``ddpjob run``: from the user's document to the finished or suspended job.

The session plays the user (it creates the job, suspends and resumes it) and the supervisor of controller and
kubelet; it judges nothing by itself. What it does at the start is in ``start``.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpjob.api import names
from ddpjob.cluster.base import Json, NotFound
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.controller.controller import Controller
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.progress import ProgressPoller
from ddpjob.engine.actions import EngineSettings
from ddpjob.local import admission, resume
from ddpjob.local.admission import render
from ddpjob.local.errors import LocalError
from ddpjob.local.kubelet import Kubelet, Machine, is_over
from ddpjob.local.references import Sources
from ddpjob.local.resources import Ports, visible_gpus
from ddpjob.local.resume import is_true
from ddpjob.local.state import StateFolder
from ddpjob.local.volumes import sweep_shared_memory

__all__ = ["Options", "Session", "render"]

_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Options:
    """How to run.

    fresh: forget the job's state, and empty the volume of its claimTemplate, first.
    volumes: claim name -> existing directory of this machine, in place of the one in the state folder.
    progress_seconds: time between two questions to rank 0.
    directory: where containers without a workingDir run; None is the current directory.
    """

    fresh: bool = False
    volumes: Mapping[str, Path] = field(default_factory=dict)
    progress_seconds: float = 0.25
    directory: Path | None = None


class Session:
    """Runs one job.

    job: the DDPJob as the user wrote it. others: Secrets and ConfigMaps that its pods may refer to.
    on_change: called with the DDPJob and its pods at the start and after every change, at most ten times a second.
    say: one line for the user, without a line's end.

    Raises:
        LocalError: the spec is refused, or a Secret cannot be read.
    """

    def __init__(
        self,
        job: Json,
        others: Sequence[Json],
        folder: StateFolder,
        options: Options,
        *,
        on_change: Callable[[Json, Sequence[Json]], None],
        say: Callable[[str], None],
    ) -> None:
        self._admitted = admission.admitted(job)
        meta = self._admitted["metadata"]
        self._namespace, self._name = str(meta["namespace"]), str(meta["name"])
        self._sources = Sources(others, self._namespace)
        self._state = folder
        self._folder = folder.job(self._namespace, self._name)
        self._options = options
        self._on_change = on_change
        self._say = say
        self._cluster = MemoryCluster()
        self._job = self._admitted
        self._news = asyncio.Event()
        self._dated: datetime | None = None

    async def run(self, stop: asyncio.Event) -> Json:
        """Run until the job is finished, or suspended because ``stop`` was set or its spec says so.

        Returns the DDPJob as it then is. Cancelling the call kills what runs at once; the state stays resumable.

        Raises:
            LocalError: another process runs this job, or the state folder or a volume cannot be used.
        """
        _require_linux()
        resume.check_volumes(self._admitted, self._options.volumes)
        try:
            with self._folder.locked(), _log_to_file(self._folder.path):
                return await self._run(stop)
        except OSError as error:
            raise LocalError(
                f"{error.filename or self._state.root}: {error.strerror or error}",
                "local mode keeps its state and the job's volumes there",
                "make room or get access, or name another folder with --state-dir or DDPJOB_STATE_DIR",
            ) from error

    async def _run(self, stop: asyncio.Event) -> Json:
        sweep_shared_memory()
        if self._options.fresh:
            resume.forget(self._folder, self._state, self._admitted, self._options.volumes, self._say)
        begin = resume.prepare(self._cluster, self._folder, self._admitted, self._say)
        self._dated = begin.dated
        resume.explain(self._admitted, self._state, self._options.volumes, self._say)
        spec, settings = admission.job_of(self._admitted).spec, EngineSettings(delete_finished=False)
        ports = Ports(rendezvous=spec.rendezvous.port, progress=names.PROGRESS_PORT)
        controller = Controller(
            self._cluster,
            settings,
            lambda on_news: ProgressPoller(self._options.progress_seconds, on_news, port_of=ports.of),
            metrics=Metrics(),
            now=self._now,
        )
        kubelet = Kubelet(self._cluster, self._machine(ports, spec.num_nodes, settings), self._news.set)
        try:
            await _beside(
                self._follow(stop, begin.suspend, controller, kubelet),
                # In this order they are ended: the controller must not judge pods that are being killed.
                controller.serve(self._cluster.watch),
                kubelet.run(),
                self._watch(names.DDPJOBS),
                self._watch(names.PODS),
                self._heed(stop),
            )
        finally:
            self._folder.save(self._cluster.dump())
        return self._job

    def _machine(self, ports: Ports, nodes: int, settings: EngineSettings) -> Machine:
        return Machine(
            server=self._cluster.server,
            folder=self._folder,
            sources=self._sources,
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
        """The time; the last sign of life of a run that was killed, while its end is being recorded."""
        return self._dated or datetime.now(UTC)

    async def _follow(self, stop: asyncio.Event, suspend: bool, controller: Controller, kubelet: Kubelet) -> None:
        """Show and save every change, and return when nothing more will happen."""
        while True:
            self._news.clear()
            self._publish()
            if self._dated is not None and (is_true(self._job, "Suspended") or is_true(self._job, "Finished")):
                self._dated = None
                stays = suspend or stop.is_set()
                self._suspend(stays)
                if not stays and not is_true(self._job, "Finished"):
                    self._say(resume.resumed(self._job))
            elif stop.is_set() and self._dated is None:
                self._suspend(True)
            if self._is_at_rest() and not kubelet.is_busy:
                await controller.flush()
                return
            await asyncio.sleep(_PAUSE_SECONDS)
            await self._news.wait()

    def _publish(self) -> None:
        """To the user and to the disk."""
        server = self._cluster.server
        with contextlib.suppress(NotFound):  # should it ever be deleted, the last that was seen is what counts
            self._job = server.get(names.DDPJOBS, self._namespace, self._name)
        self._folder.save(self._cluster.dump())
        self._on_change(self._job, server.list(names.PODS, self._namespace).items)

    def _suspend(self, suspend: bool) -> None:
        if bool(self._job["spec"].get("suspend")) != suspend and not is_true(self._job, "Finished"):
            patch = {"spec": {"suspend": suspend}}
            self._job = self._cluster.server.patch(names.DDPJOBS, self._namespace, self._name, patch)

    def _is_at_rest(self) -> bool:
        """Finished or suspended, and no pod has anything left to do."""
        suspended = self._dated is None and self._job["spec"].get("suspend") and is_true(self._job, "Suspended")
        pods = self._cluster.store.all(names.PODS, self._namespace)
        return bool(suspended or is_true(self._job, "Finished")) and all(is_over(pod) for pod in pods)

    async def _watch(self, resource: names.Resource) -> None:
        async for _ in self._cluster.watch(resource):
            self._news.set()

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._news.set()
        await asyncio.Event().wait()  # the news is passed on; the end of this task would be the end of all


async def _beside(main: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end; whatever runs beside it must not end before, and is ended after it in its order."""
    tasks = [asyncio.create_task(work) for work in (main, *background)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group  # the first has ended the others
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])


def _require_linux() -> None:
    if sys.platform != "linux":
        raise LocalError(
            f"local mode runs on Linux only, this is {sys.platform}",
            "it relies on the kernel to leave no process behind",
            "run it in a Linux virtual machine or container, or use a cluster",
        )


_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def _log_to_file(folder: Path) -> Iterator[None]:
    """Write the log of package ``ddpjob`` to ``controller.log`` there, anew, and nowhere else meanwhile."""
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
