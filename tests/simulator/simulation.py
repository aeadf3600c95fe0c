"""One simulated run of a job: the real controller on the in-memory cluster, with simulated nodes, time and faults.

The event loop has simulated time, so hours of deadlines and backoff take milliseconds. All random choices come from
seeds: the same run has the same requests.
"""

import asyncio
import itertools
import math
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.api.report import TrainingReport
from ddpjob.engine.observed import NOT_POLLED, Polled
from ddpjob_operator.cluster.base import AlreadyExists, Forbidden, NotFound, Unavailable
from ddpjob_operator.controller.listing import VersionsWentBackError
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.reconcile import Controller
from tests.builders import SETTINGS
from tests.controller.controllers import serve
from tests.simulator.faults import CRASHES, Choose, OperatorKilledError, fault
from tests.simulator.kubelets import Kubelets, Sidecar, has_ended
from tests.simulator.watches import Watches
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster
from tests.worlds.memory.store import Change

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
KEY = Key("default", "life")
LOST = "lost"
"""A namespace that the operator serves, too, and in which it has no rights at first: every request is refused."""
LOST_SECONDS = 120.0
"""Until then. The operator asks every five seconds, which would take half of the time of a run if it never ended."""
OTHER = Key("default", "other")
"""A suspended job that exists before, so that the operator has written a status when the simulated job appears."""
PATIENCE = 20_000.0
"""Maximum loop time of a run, in seconds."""
POLL_SECONDS = 0.05
STEPS = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
BEFORE_RESTORE = 10**6
"""Lowest version of an object before etcd is restored, so that versions go far back."""
QUIET_SECONDS = 60.0
SWEEP_SECONDS = 600.0
REST_SECONDS = 1300.0
"""Long enough for two sweeps."""


def now() -> datetime:
    """Return the time of the running loop as a datetime."""
    return START + timedelta(seconds=asyncio.get_running_loop().time())


class RecordedCluster(FaultyCluster):
    """Calls ``on_change`` with each change; ``useless`` lists the operator's requests that had no effect."""

    def __init__(self, hook: Callable[[Call], Fault | None], on_change: Callable[[Change], None], **options: Any):
        self._observer = on_change
        self.useless: list[str] = []
        super().__init__(hook, **options)

    def _on_change(self, change: Change) -> None:
        self._observer(change)
        super()._on_change(change)

    async def _call(self, act: Any, verb: Any, resource: Any, namespace: Any, name: str, **more: Any) -> Any:
        what = f"{verb} {resource.kind} {name}"
        try:
            answer = await super()._call(act, verb, resource, namespace, name, **more)
        except (NotFound, AlreadyExists) as error:
            # Claims are not watched, so the operator requests one at each start of an attempt.
            if resource is not names.CLAIMS:
                self.useless.append(f"{what}: {type(error).__name__}")
            raise
        if verb == "patch_status":
            sent = more["body"].get("metadata", {}).get("resourceVersion")
            if sent == answer["metadata"]["resourceVersion"]:
                self.useless.append(f"{what}: nothing changed")
        return answer


class LogRead(NamedTuple):
    """A request for the log of a pod, by the operator after this many starts, and changes of all objects.

    kind: of its fault.
    """

    time: float
    changes: int
    pod: str
    start: int
    kind: str | None


class Reports:
    """The poller of one process of the operator, without requests: it reads what the simulated rank 0 of a job shows.

    read: returns the answer of a job's rank 0 now.
    """

    def __init__(self, read: Callable[[Key], Polled | None], on_news: Callable[[Key], None]) -> None:
        self._read = read
        self._on_news = on_news
        self._targets: dict[Key, Any] = {}
        self._answers: dict[Key, tuple[float, Polled]] = {}

    def poll(self, key: Key) -> None:
        """Take the answer of the pod of a job that is followed."""
        answer, target = self._read(key), self._targets.get(key)
        _, known = self._answers.get(key, (0.0, None))
        if target is not None and answer and answer.pod == target[0] and answer != known:
            self._answers[key] = asyncio.get_running_loop().time(), answer
            self._on_news(key)

    def polled(self, key: Key) -> Polled:
        """Return the answer, and for how long it has been the same: rank 0 always answers."""
        if key not in self._answers:
            return NOT_POLLED
        since, answer = self._answers[key]
        return replace(answer, stalled_seconds=asyncio.get_running_loop().time() - since)

    def follow(self, key: Key, target: Any) -> None:
        is_new = target != self._targets.get(key)
        self._targets[key] = target
        if target is None:
            self.forget(key)
        elif is_new:
            asyncio.get_running_loop().call_later(POLL_SECONDS, self.poll, key)

    def forget(self, key: Key) -> None:
        self._targets.pop(key, None)
        self._answers.pop(key, None)

    async def close(self) -> None:
        """Do nothing."""


class JobView:
    """What a story reads of its job: ``job`` returns it, and ``all_pods`` the pods of its namespace."""

    def status(self) -> Json:
        return dict((self.job() or {}).get("status") or {})

    def attempt(self) -> int:
        return int(self.status().get("attempt") or 0)

    def pods(self) -> dict[int, Json]:
        """Return the pods of the recorded attempt that are not being deleted, by node_rank."""
        labels = [(pod, pod["metadata"].get("labels") or {}) for pod in self.all_pods()]
        return {
            int(of[names.LABEL_NODE_RANK]): pod
            for pod, of in labels
            if of.get(names.LABEL_ATTEMPT) == str(self.attempt()) and "deletionTimestamp" not in pod["metadata"]
        }


class Simulation(JobView):
    """The cluster, the operator's processes and the nodes of one run, and the actions of its script.

    choose: the fault of each request of the operator. watch: how watch events arrive. order: number of the permutation
    in which the nodes report. eager: pods start by themselves. downtime: seconds until a killed operator starts again;
    users and nodes act meanwhile. operators: how many work at the same time, and are killed together.
    sidecar: what a webhook injects into each pod. skewed: the clocks of the nodes differ.
    create_errors: share of the creates of pods that fail with an error of the API server.
    reads_logs: the operator reads the logs of failed pods. spoils_logs: some are late or stay empty.
    """

    def __init__(
        self,
        spec: Json,
        choose: Choose,
        *,
        seed: int = 0,
        watch: str = "prompt",
        order: int = 0,
        eager: bool = False,
        downtime: float = 0.0,
        operators: int = 1,
        sidecar: Sidecar = "none",
        skewed: bool = False,
        create_errors: float = 0.0,
        reads_logs: bool = False,
        spoils_logs: bool = False,
    ) -> None:
        random.seed(seed)  # the work queue's jitter
        self.spec = spec
        self.chance = random.Random(seed)
        self._uids = random.Random(seed)  # separate: an additional Event changes no other choice
        self.cluster = RecordedCluster(self._hook, self._on_change, clock=now, new_uid=self._new_uid)
        self.server, self.store = self.cluster.server, self.cluster.store
        if watch == "restored":
            self.store.version = BEFORE_RESTORE
        self.kubelets = Kubelets(
            self.server, str(seed), now, eager=eager, sidecar=sidecar, skewed=skewed, spoils_logs=spoils_logs
        )
        self.reads_logs = reads_logs
        self.log_reads: list[LogRead] = []
        self.create_errors = create_errors
        self._create_chance = random.Random(f"creates {seed}")
        self.calls: list[Call] = []
        self.changes: list[tuple[float, Change]] = []
        self.quota: int | None = None
        self.late_creates: set[str] = set()
        self.log: list[str] = []
        self._choose, self.seed, self.watch, self._order = choose, seed, watch, order
        self._eager, self._downtime = eager, downtime
        self._on_call: list[tuple[Callable[[Call], bool], Callable[[], None]]] = []
        self._on_store: list[tuple[Callable[[Change], bool], Callable[[], None]]] = []
        self._metrics = Metrics()
        self.starts = 0
        self._is_dead = self._is_started = False
        self._script: asyncio.Task[Any] | None = None
        self._revival: asyncio.Task[None] | None = None
        self._progress: Polled | None = None
        self.progress_of: Callable[[Key], Polled | None] = lambda key: self._progress if key == KEY else None
        self.patience = PATIENCE
        self.sweep_seconds = SWEEP_SECONDS
        self.operators = operators
        self._reports: list[Reports] = []
        self._watches: list[Watches] = []

    # The operator.

    async def begin(self) -> None:
        """Start the operator and wait until it has recorded a status."""
        self._script = asyncio.current_task()
        self._start_operator()
        self.create_job(OTHER, {"image": "trainer:1", "suspend": True})
        await self.until("the other job has a status", lambda: bool((self.job(OTHER) or {}).get("status")))
        await asyncio.sleep(1.0)
        self._is_started = True

    async def end(self) -> None:
        """Stop the operator."""
        await self._kill_tasks()
        for task in self.cluster.late:
            task.cancel()

    def _start_operator(self) -> None:
        self.starts += 1
        self._is_dead = False
        self._reports = []
        for number in range(self.operators):
            self._start_one(number)

    def _start_one(self, number: int) -> None:
        controller = Controller(
            self.cluster,
            replace(SETTINGS, reads_logs=self.reads_logs),
            self._make_reports,  # type: ignore[arg-type]
            self._metrics,
            scopes=(LOST, KEY.namespace),
            sweep_seconds=self.sweep_seconds,
            concurrent_requests=16,
            clock=asyncio.get_running_loop().time,
            now=now,
        )
        is_restored = self.watch == "restored" and self.store.version < BEFORE_RESTORE
        watches = Watches(
            "prompt" if is_restored else self.watch,
            f"{self.seed} {self.starts}{' second' * number}",
            self.cluster,
            partial(controller.sweeper.want, KEY.namespace),
        )
        self._watches.append(watches)
        asyncio.create_task(self._serve(controller, watches), name="operator")  # noqa: RUF006 - ``_kill_tasks`` finds it

    async def _serve(self, controller: Controller, watches: Watches) -> None:
        """Run one operator. If it ends because etcd was restored, it is started again, as by the kubelet."""
        try:
            await serve(controller, watches.open, KEY.namespace)
        except* VersionsWentBackError:
            self._crash()

    def _make_reports(self, on_news: Callable[[Key], None]) -> Reports:
        self._reports.append(Reports(self.progress_of, on_news))
        return self._reports[-1]

    async def _kill_tasks(self) -> None:
        """Cancel all tasks of the operator, so that it writes nothing any more."""
        while self._watches:
            self._watches.pop().close()
        spared = {asyncio.current_task(), self._script, *self.cluster.late}
        while tasks := asyncio.all_tasks() - spared:  # one that ends may have started another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _crash(self) -> None:
        if not self._is_dead:
            self._is_dead, self._revival = True, asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Start a killed operator again after its downtime."""
        await self._kill_tasks()
        await asyncio.sleep(self._downtime)
        self._start_operator()

    def reconciles(self) -> float:
        """Return how many reconciles ended until now."""
        samples = (sample for family in self._metrics.reconcile_seconds.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name.endswith("_count"))

    def _hook(self, call: Call) -> Fault | None:
        if self._is_dead:
            return Fault(before=OperatorKilledError())
        if call.namespace == LOST:
            is_refused = asyncio.get_running_loop().time() < LOST_SECONDS
            return Fault(before=Forbidden("no Role", code=403)) if is_refused else None
        if not self._is_started:
            return None
        self.calls.append(call)
        for trigger in [trigger for trigger in self._on_call if trigger[0](call)]:
            self._on_call.remove(trigger)
            trigger[1]()
        kind = self._choose(call)
        if call.reads_log:
            pod = call.name.removesuffix("/log")
            self.log_reads.append(LogRead(asyncio.get_running_loop().time(), len(self.changes), pod, self.starts, kind))
        if kind is None:
            return self._refusal(call)
        self.log.append(f"{asyncio.get_running_loop().time():.2f} {kind}: {call.verb} {call.resource.kind} {call.name}")
        if kind in CRASHES:
            self._crash()
        if kind == "late" and call.verb == "create":
            self.late_creates.add(call.name)
        return fault(kind, call)

    def _refusal(self, call: Call) -> Fault | None:
        if call.verb != "create" or call.resource is not names.PODS:
            return None
        if self._create_chance.random() < self.create_errors:
            return Fault(before=Unavailable("etcdserver: leader changed", code=500))
        if self.quota is None:
            return None
        if call.body is None or int(call.body["metadata"]["labels"][names.LABEL_NODE_RANK]) < self.quota:
            return None
        return Fault(before=Forbidden(f'pods "{call.name}" is forbidden: exceeded quota: pods', code=403))

    def _new_uid(self) -> str:
        return str(uuid.UUID(int=self._uids.getrandbits(128), version=4))

    def _on_change(self, change: Change) -> None:
        self.changes.append((asyncio.get_running_loop().time(), change))
        self.kubelets.on_change(change)
        for trigger in [trigger for trigger in self._on_store if trigger[0](change)]:
            self._on_store.remove(trigger)
            asyncio.get_running_loop().call_soon(trigger[1])

    # What a script waits for.

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Advance the time until ``holds``. Raises ``AssertionError`` after ``patience``."""
        for step in itertools.chain(STEPS, itertools.repeat(STEPS[-1])):
            if holds():
                return
            late = asyncio.get_running_loop().time() > self.patience
            assert not late, f"not in time: {what}\n  {self.status()}\n  " + "\n  ".join(self.log[-20:])
            await asyncio.sleep(step)

    async def pause(self, seconds: float) -> None:
        """Advance the time."""
        await asyncio.sleep(seconds)

    async def running_attempt(self) -> dict[int, Json]:
        """Start the pods of an attempt once they exist; return them by node_rank when the job runs, {} at its end."""
        while True:
            await self.until("all pods exist", lambda: self.is_complete() or self.is_finished())
            if self.is_finished():
                return {}
            number, pods = self.attempt(), self.pods()
            if not self._eager:
                for node_rank in self._permuted(sorted(pods)):
                    self.kubelets.start(pods[node_rank])
                    await self.pause(self._gap())
            await self.until(
                "the job runs",
                lambda number=number: self.is_running() or self.attempt() != number or self.is_finished(),  # type: ignore[misc]
            )
            if self.is_running() and self.attempt() == number:
                self.make_step(pods[0], 10)
                return pods

    def make_step(self, pod: Json, step: int) -> None:
        """Let rank 0, in this pod, report a step."""
        report = TrainingReport(step=step, total_steps=100, phase="train")
        self._progress = Polled(pod["metadata"]["name"], report)
        self.poll(KEY)

    def poll(self, key: Key) -> None:
        """Let the operators read what rank 0 of a job shows."""
        for reports in self._reports:
            reports.poll(key)

    async def in_any_order(self, *actions: Callable[[], None]) -> None:
        """Carry out actions of different nodes, in the order of this run, shortly one after the other."""
        for action in self._permuted(actions):
            action()
            await self.pause(self._gap())

    async def next_attempt(self, after: int) -> None:
        """Wait until a later attempt is recorded, or the job is finished."""
        await self.until("the next attempt", lambda: self.is_finished() or self.attempt() > after)

    async def rest(self) -> None:
        """Check that nothing is reconciled or written after a quiet period."""
        await self.pause(QUIET_SECONDS)
        version, reconciles = self.store.version, self.reconciles()
        await self.pause(REST_SECONDS)
        written = [f"{c.type} {c.resource.kind} {c.obj['metadata']['name']}" for _, c in self.changes]
        assert self.store.version == version, f"written at rest: {written[version - self.store.version :]}"
        # The operator may start during the rest; the retry of one that another forestalled may be due.
        is_disturbed = bool(self.log) or self.watch == "dropped" or self.operators > 1
        assert is_disturbed or self.reconciles() == reconciles, "reconciled at rest"

    def _permuted(self, items: Sequence[Any]) -> Sequence[Any]:
        number = self._order % math.factorial(len(items))
        return next(itertools.islice(itertools.permutations(items), number, None))

    def _gap(self) -> float:
        return (0.3, 0.0, 1.0)[self._order // 2 % 3]

    # What a script does and reads.

    def on_call(self, matches: Callable[[Call], bool], action: Callable[[], None]) -> None:
        """Carry out ``action`` once, just before the first request of the operator that matches."""
        self._on_call.append((matches, action))

    def on_store(self, matches: Callable[[Change], bool], action: Callable[[], None]) -> None:
        """Carry out ``action`` once, after the first change that matches."""
        self._on_store.append((matches, action))

    def create_job(self, key: Key = KEY, spec: Json | None = None) -> Json:
        meta = {"name": key.name, "namespace": key.namespace}
        job = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": meta, "spec": spec or self.spec}
        return self.server.create(names.DDPJOBS, key.namespace, job)

    def patch_job(self, **spec: Any) -> None:
        """Change fields of the job's spec, as its user."""
        self.server.patch(names.DDPJOBS, *KEY, {"spec": spec})

    def delete_job(self) -> None:
        self.server.delete(names.DDPJOBS, *KEY)

    def job(self, key: Key = KEY) -> Json | None:
        return self.store.get(names.DDPJOBS, *key)

    def all_pods(self) -> Iterator[Json]:
        return self.store.all(names.PODS)

    @property
    def last_status(self) -> Json:
        """The job's status, or the last one before it was deleted."""
        jobs = (c.obj for _, c in reversed(self.changes) if c.resource is names.DDPJOBS and self.is_of_job(c))
        return dict(next(jobs).get("status") or {})

    def is_finished(self) -> bool:
        return self.job() is None or self.status().get("state") in ("Succeeded", "Failed")

    def is_running(self) -> bool:
        return self.status().get("state") == "Running"

    def is_complete(self) -> bool:
        job = self.job()
        return job is not None and self.attempt() > 0 and len(self.pods()) == job["spec"]["numNodes"]

    def active_pods(self) -> list[Json]:
        """Return all pods that hold resources."""
        return [pod for pod in self.store.all(names.PODS) if not has_ended(pod)]

    def is_of_job(self, change: Change) -> bool:
        """Return whether the change is not about the other job."""
        return change.obj["metadata"]["name"] != OTHER.name

    def owned_objects(self) -> list[Json]:
        """Return the objects that must not outlive the job; the claim contains the trained model and does."""
        kept = (names.EVENTS, names.CLAIMS, names.DDPJOBS)
        return [obj for resource, obj in self.store.everything() if resource not in kept]
