"""One ``ddpjob run``, from the admitted job to the finished or suspended one: the loop that carries out its plans.

    event (a process ended, progress changed, a stop was asked for, a deadline passed)
      ─▶ observe ─▶ plan ─▶ record ─▶ deletes, creates ─▶ wait for the next event

The status is on disk before any process is started or stopped, so a kill at any moment leaves the decision recorded.
"""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json, is_true
from ddpjob.api.pod_view import pod_view
from ddpjob.api.times import timestamp
from ddpjob.clock import SteadyClock
from ddpjob.engine.actions import Note, Plan
from ddpjob.engine.events import RESTARTED_IN_PLACE
from ddpjob.engine.observed import NOT_POLLED, Observed, owned_pods
from ddpjob.engine.plan import plan
from ddpjob.errors import DDPJobError
from ddpjob.local import LocalJobExistsError, resume
from ddpjob.local.admission import SETTINGS, AdmittedJob
from ddpjob.local.pod_process import Machine, PodProcess
from ddpjob.local.state import EVENTS, usable
from ddpjob.local.translate import LOOPBACK

if TYPE_CHECKING:
    from ddpjob.progress.poller import ProgressPoller

NODE_NAME = "local"


@dataclass(kw_only=True)
class Session:
    """Runs one job.

    on_change: called with the DDPJob and its pods at the start and after every change.
    say: prints one line for the user; the line has no line feed.
    is_new: refuse to replace or resume a job of this name.
    fresh: first remove the job's record and empty the volume of its claimTemplate.
    on_error: called with an error that ends the run, before the job's lock is released.
    progress_seconds: time between two progress requests to rank 0.
    job: the DDPJob as it was last recorded.

    Raises:
        LocalError: local mode cannot carry out the pods of this job.
    """

    admitted: AdmittedJob
    machine: Machine
    on_change: Callable[[Json, Sequence[Json]], None]
    say: Callable[[str], None]
    fresh: bool = False
    is_new: bool = False
    on_error: Callable[[DDPJobError], None] = lambda error: None
    progress_seconds: float = 0.25
    job: Json = field(init=False)
    _pods: dict[str, PodProcess] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _clock: SteadyClock = field(default_factory=SteadyClock, init=False)
    _is_stopped: bool = field(default=False, init=False)
    _poller: "ProgressPoller | None" = field(default=None, init=False)
    _token_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), init=False, repr=False)

    def __post_init__(self) -> None:
        self.job = self.admitted.body
        self._key = Key(self.admitted.job.namespace, self.admitted.job.name)
        PodProcess(self.admitted.pods[0], self.machine, self._changed.set)  # refuses what it cannot carry out

    @property
    def pods(self) -> list[Json]:
        return [process.pod for process in self._pods.values()]

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
        record = self.machine.paths.record
        with usable(record.path), record.locked():
            try:
                with usable(record.path):
                    return await self._run()
            except DDPJobError as error:
                self.on_error(error)  # without the lock, nothing runs the job: then its error has to be known
                raise

    async def _run(self) -> Json:
        record = self.machine.paths.record
        if self.is_new and record.job() is not None:
            raise LocalJobExistsError.of(record.name, record.namespace)
        if self.fresh:
            resume.remove_state(self.admitted, self.machine.paths, self.say)
        self.job = resume.start_or_resume(record, self.admitted, self.say)
        try:
            with (record.path / EVENTS).open("a") as events:
                await self._follow(events)
        finally:
            for process in self._pods.values():
                process.kill()
            await asyncio.gather(*(process.task for process in self._pods.values()), return_exceptions=True)
            if self._poller is not None:
                await self._poller.close()
        return self.job

    async def _follow(self, events: TextIO) -> None:
        """Plan after every event; return when the job is finished or suspended and no process runs."""
        while True:
            self._changed.clear()
            self._forget_deleted()
            if self._is_stopped and not is_true(self.job.get("status"), "Finished"):
                self.job = resume.changed(self.job, self.job["spec"] | {"suspend": True})
            made = plan(self.job, self._observed(), self._clock.now(), SETTINGS)
            if made.status is not None:
                self.job = self.job | {"status": made.status}
            self.machine.paths.record.save(self.job, self.pods, self.machine.place)
            self._act(made)
            for note in made.events:
                self._announce(note, events)
            self.on_change(self.job, self.pods)
            if made.urgent:
                continue  # a decision is followed by another plan
            is_over = any(is_true(self.job["status"], name) for name in ("Finished", "Suspended"))
            if is_over and all(process.task.done() for process in self._pods.values()):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), made.requeue_after)

    def _forget_deleted(self) -> None:
        """Drop the deleted pods that have ended. Raises the error of a pod that could not run."""
        for name, process in list(self._pods.items()):
            if process.task.done():
                process.task.result()
                if "deletionTimestamp" in process.pod["metadata"]:
                    del self._pods[name]

    def _observed(self) -> Observed:
        return Observed(
            owned_pods(self.job, map(pod_view, self.pods)),
            service={},  # not needed on one machine, as if it existed
            claim={},
            round="complete",  # all pods of an attempt are created at once
            logs={process.pod["metadata"]["uid"]: process.logged for process in self._pods.values()},
            progress=self._poller.polled(self._key) if self._poller else NOT_POLLED,
            token_key=self._token_key,
            live=True,
        )

    def _act(self, made: Plan) -> None:
        for delete in made.deletes:
            process = self._pods[delete.name]
            if process.task.done():
                del self._pods[delete.name]
            else:
                process.stop()
        for create in (create for phase in made.creates for create in phase):
            if create.resource is names.PODS:
                port = {names.ANNOTATION_PROGRESS_PORT: str(self.machine.ports.of(create.name))}
                meta: Json = {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(self._clock.now())}
                meta |= {"annotations": (create.body["metadata"].get("annotations") or {}) | port}
                spec = create.body["spec"] | {"nodeName": NODE_NAME}
                pod = create.body | {"metadata": create.body["metadata"] | meta, "spec": spec}
                self._pods[create.name] = PodProcess(pod, self.machine, self._changed.set)
                self._pods[create.name].start()
        self._poll(made)

    def _poll(self, made: Plan) -> None:
        if self._poller is None and made.poll is not None:
            from ddpjob.progress.poller import ProgressPoller  # noqa: PLC0415 - slow; the pods run meanwhile

            self._poller = ProgressPoller(self.progress_seconds, lambda _: self._changed.set())
        if self._poller is not None:
            target = (made.poll[0], LOOPBACK, self.machine.ports.of(made.poll[0])) if made.poll is not None else None
            self._poller.follow(self._key, target)

    def _announce(self, note: Note, events: TextIO) -> None:
        message = " ".join(note.message.split())
        print(f"{timestamp(self._clock.now())} {note.type} {note.reason}: {message}", file=events, flush=True)
        if note.reason == "Resumed":
            self.say(f"Resumed: attempt {self.job['status']['attempt']} begins")
        elif note.reason == RESTARTED_IN_PLACE:
            self.say(message)
