"""One ``ddpjob run``, from the admitted job to the finished or suspended one: the loop that carries out its plans.

    event (a process ended, progress changed, a stop was asked for, a deadline passed)
      ─▶ observe ─▶ plan ─▶ record ─▶ deletes, creates ─▶ wait for the next event

The status is on disk before any process is started or stopped, so a kill at any moment leaves the decision recorded.
"""

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddpjob.api.pod_view import pod_view
from ddpjob.api.times import timestamp
from ddpjob.cluster.clock import SteadyClock
from ddpjob.controller.cache import Key
from ddpjob.engine.actions import Create, Note, Plan
from ddpjob.engine.observed import Observed, owned_pods
from ddpjob.engine.plan import plan
from ddpjob.local import LocalError, resume
from ddpjob.local.admission import AdmittedJob
from ddpjob.local.pod_process import Machine, PodProcess
from ddpjob.local.references import References
from ddpjob.local.resources import Ports, visible_gpus
from ddpjob.local.state import HostPaths
from ddpjob.local.translate import LOOPBACK

if TYPE_CHECKING:
    from ddpjob.controller.progress import ProgressPoller

NODE_NAME = "local"


class Session:
    """Runs one job.

    others: Secrets and ConfigMaps that the pods may refer to.
    on_change: called with the DDPJob and its pods at the start and after every change.
    say: prints one line for the user; the line has no line feed.
    fresh: first remove the job's record and empty the volume of its claimTemplate.
    directory: where programs without a workingDir run; None is the current directory.
    progress_seconds: time between two progress requests to rank 0.
    job: the DDPJob as it was last recorded.

    Raises:
        LocalError: local mode cannot carry out the pods of this job.
    """

    def __init__(
        self,
        admitted: AdmittedJob,
        others: Sequence[Json],
        paths: HostPaths,
        *,
        on_change: Callable[[Json, Sequence[Json]], None],
        say: Callable[[str], None],
        fresh: bool = False,
        directory: Path | None = None,
        progress_seconds: float = 0.25,
    ) -> None:
        _require_linux()
        self._admitted = admitted
        self._paths = paths
        self._folder = paths.record
        self._key = Key(admitted.job.namespace, admitted.job.name)
        self._on_change = on_change
        self._say = say
        self._is_fresh = fresh
        self._progress_seconds = progress_seconds
        self.job = admitted.body
        self._pods: dict[str, Json] = {}
        self._processes: dict[str, tuple[PodProcess, asyncio.Task[None]]] = {}
        self._others: dict[names.Resource, Json] = {}
        self._changed = asyncio.Event()
        self._is_stopped = False
        self._clock = SteadyClock()
        self._poller: ProgressPoller | None = None
        self._machine = Machine(
            folder=self._folder,
            references=References(others, admitted.job.namespace),
            ports=Ports(),
            claim_directory=paths.claim,
            directory=(directory or Path.cwd()).absolute(),
            nodes=admitted.job.spec.num_nodes,
            cpus=sorted(os.sched_getaffinity(0)),
            gpus=visible_gpus(),
            gpus_per_node=admitted.job.spec.devices_per_node,
        )
        PodProcess(admitted.pods[0], self._machine, self._changed.set)  # refuses what it cannot carry out

    @property
    def pods(self) -> list[Json]:
        return list(self._pods.values())

    def stop(self) -> None:
        """Suspend the job: its nodes save and exit, and then ``run`` returns."""
        self._is_stopped = True
        self._changed.set()

    async def run(self) -> Json:
        """Run until the job is finished, or suspended by ``stop`` or by its own spec. Return the DDPJob.

        Cancelling the call kills all processes at once; the job can still be resumed.

        Raises:
            LocalError: another process runs this job, or the state folder or a volume cannot be used.
        """
        try:
            with self._folder.locked():
                return await self._run()
        except OSError as error:
            raise LocalError(
                f"{error.filename or self._folder.path}: {error.strerror or error}",
                "local mode keeps its state and the job's volumes there",
                "free space or fix the permissions, or name another folder with --state-dir or DDPJOB_STATE_DIR",
            ) from error

    async def _run(self) -> Json:
        if self._is_fresh:
            resume.remove_state(self._admitted, self._paths, self._say)
        self.job = resume.start_or_resume(self._folder, self._admitted, self._say)
        resume.explain_differences(self._admitted, self._paths, self._say)
        try:
            with (self._folder.path / "events.log").open("w") as events:
                await self._follow(events)
        finally:
            for process, _ in self._processes.values():
                process.kill()
            await asyncio.gather(*(task for _, task in self._processes.values()), return_exceptions=True)
            if self._poller is not None:
                await self._poller.close()
        return self.job

    async def _follow(self, events: TextIO) -> None:
        """Plan after every event; return when the job is finished or suspended and no process runs."""
        while True:
            self._changed.clear()
            self._forget_ended()
            if self._is_stopped and not is_true(self.job.get("status"), "Finished"):
                self.job = resume.changed(self.job, self.job["spec"] | {"suspend": True})
            made = plan(self.job, self._observed(), self._clock.now(), resume.SETTINGS)
            if made.status is not None:
                self.job = self.job | {"status": made.status}
            self._folder.save(self.job, self.pods)
            self._act(made)
            for note in made.events:
                self._announce(note, events)
            self._on_change(self.job, self.pods)
            if made.urgent:
                continue  # a decision is followed by another plan
            if not self._processes and any(is_true(self.job["status"], name) for name in ("Finished", "Suspended")):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), made.requeue_after)

    def _forget_ended(self) -> None:
        """Drop the processes that have ended, and their pods if they were deleted. Raises the error of a process."""
        for name, (process, task) in list(self._processes.items()):
            if task.done():
                task.result()
                del self._processes[name]
                if "deletionTimestamp" in process.pod["metadata"]:
                    del self._pods[name]

    def _observed(self) -> Observed:
        poller, key = self._poller, self._key
        answer = poller.answer(key) if poller else None
        return Observed(
            owned_pods(self.job, map(pod_view, self.pods)),
            service=self._others.get(names.SERVICES),
            claim=self._others.get(names.CLAIMS),
            round="complete",  # all pods of an attempt are created at once
            progress=answer.progress if answer else None,
            progress_pod=answer.pod if answer else None,
            stalled_seconds=poller.stalled_seconds(key) if poller else None,
            progress_problem=poller.problem(key) if poller else None,
            live=True,
        )

    def _act(self, made: Plan) -> None:
        for delete in made.deletes:
            if delete.name in self._processes:
                self._processes[delete.name][0].stop()
            else:
                del self._pods[delete.name]
        for create in (create for phase in made.creates for create in phase):
            if create.resource is names.PODS:
                self._start(create)
            else:
                self._others[create.resource] = create.body
        self._poll(made)

    def _start(self, create: Create) -> None:
        meta = {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(self._clock.now())}
        body, name = create.body, create.name
        pod = body | {"metadata": body["metadata"] | meta, "spec": body["spec"] | {"nodeName": NODE_NAME}}
        process = PodProcess(pod, self._machine, self._changed.set)
        task = asyncio.create_task(process.run(), name=name)
        task.add_done_callback(lambda _: self._changed.set())
        self._pods[name], self._processes[name] = pod, (process, task)

    def _poll(self, made: Plan) -> None:
        if self._poller is None and made.poll is not None:
            from ddpjob.controller.progress import ProgressPoller  # noqa: PLC0415 - slow; the pods run meanwhile

            self._poller = ProgressPoller(self._progress_seconds, lambda _: self._changed.set())
        if self._poller is not None:
            target = (made.poll[0], LOOPBACK, self._machine.ports.of(made.poll[0])) if made.poll is not None else None
            self._poller.follow(self._key, target)

    def _announce(self, note: Note, events: TextIO) -> None:
        message = " ".join(note.message.split())
        print(f"{timestamp(self._clock.now())} {note.type} {note.reason}: {message}", file=events, flush=True)
        if note.reason == "Resumed":
            self._say(f"Resumed: attempt {self.job['status']['attempt']} begins")


def _require_linux() -> None:
    if sys.platform != "linux":
        raise LocalError(
            f"local mode runs on Linux only, this is {sys.platform}",
            "it needs features of the Linux kernel to stop every process of a job",
            "run it in a Linux virtual machine or container, or use a cluster",
        )
