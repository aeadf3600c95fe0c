"""One lifecycle of a job on the in-memory cluster: the real controller, a simulated kubelet, and injected faults.

The event loop has simulated time, so hours of deadlines and backoff take milliseconds. All random choices come from
the seed: the same seed gives the same lifecycle.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.wire import Json
from ddpjob.cluster.base import NotFound, TooManyRequests, Unavailable
from ddpjob.controller.cache import Key
from ddpjob.controller.controller import Controller
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.progress import Answer
from tests.builders import SETTINGS, ended, failed, running
from tests.cluster.faulty_cluster import Call, Fault, FaultyCluster, lost_answer
from tests.controller.faketime import run

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
KEY = Key("default", "life")
PATIENCE = 20_000.0
"""Maximum loop time of a lifecycle, in seconds."""
STEPS = (0.0, 0.01, 0.1, 1.0, 5.0, 20.0, 60.0, 300.0)
QUIET_SECONDS = 60.0
REST_SECONDS = 1300.0
"""Long enough for two sweeps."""
TROUBLES = ("refused", "busy", "lost", "killed before", "killed after")
MAX_ATTEMPTS = 60
FATES = ("succeed", "succeed", "succeed", "succeed", "1", "137", "vanish", "evicted", "suspend", "out of memory")


def now() -> datetime:
    """Return the time of the running loop as a datetime."""
    return START + timedelta(seconds=asyncio.get_running_loop().time())


class OperatorKilledError(BaseException):
    """The operator's process is killed during a request. Not an Exception, so no error handler catches it."""


class Reports:
    """The last report of the simulated rank 0. Replaces the poller, without requests."""

    def __init__(self, on_news: Callable[[Key], None]) -> None:
        self._on_news = on_news
        self._answer: Answer | None = None

    def say(self, pod: str, progress: Json) -> None:
        self._answer = Answer(pod, progress)
        self._on_news(KEY)

    def answer(self, key: Key) -> Answer | None:
        del key
        return self._answer

    def stalled_seconds(self, key: Key) -> None:
        """Return None: the step is not known to stand still."""

    def follow(self, key: Key, target: Any) -> None:
        """Do nothing: the test sends the reports."""

    def forget(self, key: Key) -> None:
        del key
        self._answer = None

    async def close(self) -> None:
        """Do nothing."""


async def kill_all_tasks() -> None:
    """Cancel every task except the caller's, so that nothing is written any more."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Trouble = Callable[[Call], str | None]
"""Returns the fault of a request of the operator: one of ``TROUBLES``, or None."""


def now_and_then(seed: int) -> Trouble:
    """Return a function that injects a random fault in one request of twenty."""
    chance = random.Random(seed)
    return lambda call: chance.choice(TROUBLES) if chance.random() < 0.05 else None


def at_write(number: int, trouble: str) -> Trouble:
    """Return a function that injects ``trouble`` at one write, counted from 1."""
    writes = itertools.count(1)
    return lambda call: (
        trouble if call.is_write and call.resource is not names.EVENTS and next(writes) == number else None
    )


class Life:
    """One job from its creation to its deletion.

    fates: how its attempts end. spec: of the job. Both are left to chance where not given.
    """

    def __init__(
        self, seed: int, trouble: Trouble | None = None, fates: Sequence[str] = (), spec: Json | None = None
    ) -> None:
        self.random = random.Random(seed)
        self._uids = random.Random(seed)  # separate: an additional Event changes no other choice
        random.seed(seed)  # the work queue's jitter
        self.cluster = FaultyCluster(self._hook, clock=now, new_uid=self._new_uid)
        self.server = self.cluster.server
        self.calls: list[Call] = []
        self.log: list[str] = []
        self._trouble = trouble
        self._fates = iter(fates)
        self._spec = spec or self._random_spec()
        self._fresh_patches = 0
        self._victims: list[str] = []
        self._metrics = Metrics()
        self._is_dead = True
        self._task: asyncio.Task[None]
        self._reports: Reports

    def _new_uid(self) -> str:
        return str(uuid.UUID(int=self._uids.getrandbits(128), version=4))

    def _hook(self, call: Call) -> Fault | None:
        self.calls.append(call)
        if call.verb == "patch_status" and call.body and (job := self._job_now()):
            # A patch that is refused for its old resourceVersion is not counted.
            self._fresh_patches += call.body["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]
        if self._is_dead:
            return Fault(before=OperatorKilledError())
        match self._trouble(call) if self._trouble else None:
            case "refused":
                return Fault(before=Unavailable(f"{call.verb}: connection refused"))
            case "busy":
                return Fault(before=TooManyRequests("busy", retry_after=1.0, code=429))
            case "lost":
                return lost_answer(call.verb)
            case "killed before":
                self._is_dead = True
                return Fault(before=OperatorKilledError())
            case "killed after":
                self._is_dead = True
                return Fault(after=OperatorKilledError())
        return None

    async def live(self) -> None:
        """Run the lifecycle. Raises ``AssertionError`` if an invariant is violated."""
        self._start_operator()
        ttl = self._spec.get("ttlSecondsAfterFinished")
        meta = {"name": KEY.name, "namespace": KEY.namespace}
        job = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": meta, "spec": self._spec}
        self.server.create(names.DDPJOBS, KEY.namespace, job)
        for _ in range(MAX_ATTEMPTS):
            await self._until("the gang is complete", lambda: self._is_complete() or self._is_finished())
            if self._is_finished():
                break
            await self._run_pods()
            await self._meet_fate(next(self._fates, None) or self.random.choice(FATES))
        else:
            raise AssertionError("the job is not finished after the maximum number of attempts")
        self._check_the_end()
        if ttl is not None:
            await self._until("its time to live is over", lambda: self._job_now() is None)
        await self._rest()
        if ttl is None:
            self.server.delete(names.DDPJOBS, *KEY)
        await self._rest()
        left = [
            obj for resource, obj in self.cluster.store.everything() if resource not in (names.EVENTS, names.CLAIMS)
        ]
        assert not left, f"orphans: {left}"
        await kill_all_tasks()

    def _start_operator(self) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():.2f} the operator starts")
        self._is_dead = False
        controller = Controller(
            self.cluster,
            SETTINGS,
            self._make_reports,  # type: ignore[arg-type]
            metrics=self._metrics,
            concurrent_requests=16,
            sweep_seconds=600.0,
            clock=asyncio.get_running_loop().time,
            now=now,
        )
        self._task = asyncio.create_task(controller.serve(self.cluster.watch))

    def _make_reports(self, on_news: Callable[[Key], None]) -> Reports:
        self._reports = Reports(on_news)
        return self._reports

    def _random_spec(self) -> Json:
        size = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany"]}
        spec = {
            "image": "trainer:1",
            "numNodes": self.random.randint(1, 3),
            "restartPolicy": {"maxRestarts": self.random.randint(0, 3)},
        }
        volume = self.random.choice([{}, {}, {}, {"checkpoint": {"claimTemplate": {"spec": size}}}])
        return spec | volume | self.random.choice([{}, {}, {"ttlSecondsAfterFinished": 30}])

    async def _run_pods(self) -> None:
        """Bind the pods and start their trainers in random order, like scheduler and kubelet."""
        pods = self._pods()
        self.random.shuffle(pods)
        for pod in pods:
            self.server.bind(KEY.namespace, pod["metadata"]["name"], f"worker-{self.random.randint(1, 3)}")
        for pod in pods:
            self._report(pod, running(podIP="192.0.2.1"))
            await asyncio.sleep(self.random.choice([0.0, 0.1, 2.0]))
        await self._until("the job runs", lambda: self._status().get("state") == "Running")
        first = min(pods, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_NODE_RANK]))
        self._reports.say(first["metadata"]["name"], {"step": 10, "totalSteps": 100, "phase": "train"})

    async def _meet_fate(self, fate: str) -> None:
        attempt = self._status()["attempt"]
        self.log.append(f"{asyncio.get_running_loop().time():.2f} attempt {attempt}: {fate}")
        pods = self._pods()
        victim = self.random.choice(pods)
        match fate:
            case "succeed":
                for pod in pods:
                    self._report(pod, ended(0, at=now()))
                    await asyncio.sleep(self.random.choice([0.0, 0.5]))
                await self._until("the job has succeeded", lambda: self._status().get("state") == "Succeeded")
                return
            case "suspend":
                self.server.patch(names.DDPJOBS, *KEY, {"spec": {"suspend": True}})
                await self._until("the job is suspended", lambda: self._is_suspended() and not self._active_pods())
                self.server.patch(names.DDPJOBS, *KEY, {"spec": {"suspend": False}})
            case "vanish":
                self.server.delete(names.PODS, KEY.namespace, victim["metadata"]["name"], grace_seconds=0)
            case "out of memory":
                await self._run_out_of_memory(pods, victim)
            case "evicted":
                self._report(victim, {"phase": "Failed", "reason": "Evicted", "message": "node pressure"})
            case code:
                self._report(victim, ended(int(code), at=now()))
        await self._until("the next attempt", lambda: self._is_finished() or self._status().get("attempt", 0) > attempt)

    async def _run_out_of_memory(self, pods: list[Json], victim: Json) -> None:
        """One pod is killed, the others lose a peer; their ends are reported in any order."""
        for pod in pods:
            killed = ended(137, reason="OOMKilled", at=now())
            status = killed if pod is victim else failed(77, cause="peer", at=now())
            with contextlib.suppress(NotFound):
                self._report(pod, status)
            await asyncio.sleep(self.random.choice([0.0, 0.3]))
        self._victims.append(victim["metadata"]["name"])

    def _report(self, pod: Json, status: Json) -> None:
        self.server.patch_status(names.PODS, KEY.namespace, pod["metadata"]["name"], {"status": status})

    async def _until(self, what: str, holds: Callable[[], bool]) -> None:
        """Advance time until ``holds``; meanwhile remove terminating pods and restart a killed operator."""
        for step in itertools.chain(STEPS, itertools.repeat(STEPS[-1])):
            self._reap()
            if self._is_dead:
                await kill_all_tasks()
                self._start_operator()
            if holds():
                return
            late = asyncio.get_running_loop().time() > PATIENCE
            assert not late, f"not in time: {what}\n  {self._status()}\n  " + "\n  ".join(self.log)
            await asyncio.sleep(step)

    def _reap(self) -> None:
        """Remove terminating pods, like the kubelet."""
        for pod in list(self.cluster.store.all(names.PODS)):
            if "deletionTimestamp" in pod["metadata"]:
                self.server.delete(names.PODS, KEY.namespace, pod["metadata"]["name"], grace_seconds=0)

    async def _rest(self) -> None:
        """Check that nothing is written after a quiet period."""
        quiet_at = asyncio.get_running_loop().time() + QUIET_SECONDS
        await self._until("a time of quiet", lambda: asyncio.get_running_loop().time() > quiet_at)
        version, rested_at = self.cluster.store.version, asyncio.get_running_loop().time() + REST_SECONDS
        reconciles = self._reconciles()
        await self._until("the end of the rest", lambda: asyncio.get_running_loop().time() > rested_at)
        assert self.cluster.store.version == version, (
            f"written at rest: {self.writes()[version - self.cluster.store.version :]}"
        )
        if self._trouble is None:  # with faults the operator may be killed during a LIST, and starts again
            # Services are not watched: the sweep finds that the deleted job's is gone.
            allowed = 1 if self._job_now() is None else 0
            assert self._reconciles() - reconciles <= allowed, "reconciled at rest"

    def _reconciles(self) -> float:
        lines = self._metrics.render().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("ddpjob_reconcile_duration_seconds_count")
        )

    def _check_the_end(self) -> None:
        """Check the invariants of the whole history."""
        made: set[str] = set()
        attempt = highest = 0
        for change in self.cluster.store.changes_after(0):
            if change.resource is names.DDPJOBS:
                status = change.obj.get("status") or {}
                attempt = int(status.get("attempt") or 0)
                assert attempt >= highest, f"attempt {attempt} after {highest}"
                highest = attempt
                budget = change.obj["spec"]["restartPolicy"]["maxRestarts"]
                assert status.get("restartsCountedTowardsLimit", 0) <= budget, "the budget is overdrawn"
            if change.resource is names.PODS and change.type == "ADDED":
                name = change.obj["metadata"]["name"]
                assert name not in made, f"{name} was made twice"
                made.add(name)
                of = int(change.obj["metadata"]["labels"][names.LABEL_ATTEMPT])
                assert of == attempt, f"{name} was made while attempt {attempt} was recorded"
        blamed = {failure.get("pod") for failure in self._all_failures()}
        assert blamed.issuperset(self._victims), f"{self._victims} ran out of memory, blamed: {blamed}"
        if self._trouble is None:
            self._check_no_useless_write()

    def _all_failures(self) -> list[Json]:
        changes = [change.obj for change in self.cluster.store.changes_after(0) if change.resource is names.DDPJOBS]
        return [failure for job in changes for failure in (job.get("status") or {}).get("failures", ())]

    def _check_no_useless_write(self) -> None:
        """Check that every status patch changed the status."""
        changed = sum(
            change.type == "MODIFIED" and (change.before or {}).get("status") != change.obj.get("status")
            for change in self.cluster.store.changes_after(0)
            if change.resource is names.DDPJOBS
        )
        assert self._fresh_patches == changed, f"{self._fresh_patches} status patches made {changed} changes"

    def writes(self) -> list[str]:
        """Return all writes in order."""
        changes = self.cluster.store.changes_after(0)
        return [f"{c.version} {c.type} {c.resource.kind} {c.obj['metadata']['name']}" for c in changes]

    def outcome(self) -> Json:
        """Return the final status without times, and all objects that were created and deleted."""
        last = [c.obj.get("status") for c in self.cluster.store.changes_after(0) if c.resource is names.DDPJOBS][-1]
        status: Json = last or {}
        kept = ("state", "attempt", "restarts", "restartsCountedTowardsLimit", "succeededNodes", "nodes", "world")
        failures = [{k: v for k, v in f.items() if k != "time"} for f in status.get("failures", ())]
        conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
        made = Counter(
            line.split(" ", 1)[1] for line in self.writes() if "MODIFIED" not in line and "Event" not in line
        )
        return {key: status.get(key) for key in kept} | {
            "failures": failures,
            "conditions": conditions,
            "made": made,
        }

    def _job_now(self) -> Json | None:
        return self.cluster.store.get(names.DDPJOBS, *KEY)

    def _status(self) -> Json:
        status: Json = (self._job_now() or {}).get("status") or {}
        return status

    def _is_finished(self) -> bool:
        return self._job_now() is None or self._status().get("state") in ("Succeeded", "Failed")

    def _is_suspended(self) -> bool:
        return self._status().get("state") == "Suspended"

    def _active_pods(self) -> list[Json]:
        pods = list(self.cluster.store.all(names.PODS))
        return [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def _pods(self) -> list[Json]:
        """Return the pods of the recorded attempt that are not terminating."""
        attempt = str(self._status().get("attempt"))
        return [
            pod
            for pod in self.cluster.store.all(names.PODS)
            if pod["metadata"]["labels"][names.LABEL_ATTEMPT] == attempt and "deletionTimestamp" not in pod["metadata"]
        ]

    def _is_complete(self) -> bool:
        job = self._job_now()
        return job is not None and len(self._pods()) == job["spec"]["numNodes"] and bool(self._status().get("attempt"))


def live(seed: int, trouble: Trouble | None = None, fates: Sequence[str] = (), spec: Json | None = None) -> Life:
    """Run the lifecycle of ``seed`` in a new event loop. Raises ``AssertionError``."""

    async def begin() -> Life:
        asyncio.get_running_loop().set_exception_handler(_report_but_for_killings)
        life = Life(seed, trouble, fates, spec)
        await life.live()
        return life

    return run(begin())


def _report_but_for_killings(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), OperatorKilledError):
        loop.default_exception_handler(context)


def live_many(seeds: Sequence[int]) -> tuple[list[str], int, float]:
    """Run lifecycles, every second with faults; return the failures, the process id and its CPU seconds."""
    logging.disable(logging.CRITICAL)  # thousands of expected warnings
    failures = []
    for seed in seeds:
        try:
            live(seed, trouble_of(seed))
        except AssertionError as error:
            failures.append(f"python -m tests.engine.memory_life {seed}: {error}")
    return failures, os.getpid(), time.process_time()


def trouble_of(seed: int) -> Trouble | None:
    return now_and_then(seed) if seed % 2 else None


if __name__ == "__main__":
    one = live(int(sys.argv[1]), trouble_of(int(sys.argv[1])))
    print("\n".join(one.writes()))
