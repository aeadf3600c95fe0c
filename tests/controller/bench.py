"""A controller on the in-memory cluster, in simulated time."""

import asyncio
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.reconcile import Controller
from tests.builders import SETTINGS, running
from tests.controller.controllers import a_controller, serve
from tests.controller.faketime import run
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def now() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


class Bench:
    """A controller on the in-memory cluster; ``rule`` returns the fault of a call."""

    def __init__(self) -> None:
        self.rule: Callable[[Call], Fault | None] = lambda call: None
        self.calls: list[Call] = []
        self.cluster = FaultyCluster(self._hook, clock=now)
        self.server = self.cluster.server
        self.metrics = Metrics()
        self.settings = SETTINGS
        self.controllers: list[Controller] = []
        self._tasks: list[asyncio.Task[None]] = []

    def refuse(
        self, error: BaseException | None, verb: str = "", resource: Resource | None = None, *, times: int = 10**9
    ) -> None:
        """Answer so many calls with an error: of each verb and kind, or of these; None carries all calls out."""
        faults = itertools.repeat(Fault(before=error), times if error is not None else 0)
        self.rule = lambda call: (
            next(faults, None) if verb in ("", call.verb) and resource in (None, call.resource) else None
        )

    def _hook(self, call: Call) -> Fault | None:
        self.calls.append(call)
        return self.rule(call)

    async def begin(self) -> None:
        """Start an operator, beside those that run."""
        controller = a_controller(
            self.cluster, progress_seconds=1e9, settings=self.settings, metrics=self.metrics, now=now
        )
        self.controllers.append(controller)
        self._tasks.append(asyncio.create_task(serve(controller, self.cluster.watch)))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restart(self, **changes: Any) -> None:
        """Start the operator again with other settings."""
        await self.end()
        self.settings = replace(self.settings, **changes)
        await self.begin()

    def submit(self, name: str = "mnist", labels: Json | None = None, **spec: Any) -> Json:
        meta = {"name": name, "namespace": "default", "labels": labels or {}}
        job = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": meta}
        spec = {"image": "trainer:1", "numNodes": 2} | spec
        created: Json = self.server.create(names.DDPJOBS, "default", job | {"spec": spec})
        return created

    def status(self) -> Json:
        job = self.cluster.store.get(names.DDPJOBS, "default", "mnist")
        return dict((job or {}).get("status") or {})

    def pods(self, attempt: int) -> list[Json]:
        pods = [p for p in self.cluster.store.all(names.PODS) if "deletionTimestamp" not in p["metadata"]]
        return [p for p in pods if p["metadata"]["labels"][names.LABEL_ATTEMPT] == str(attempt)]

    def pods_of(self, job: str) -> list[Json]:
        pods = self.cluster.store.all(names.PODS)
        return [pod for pod in pods if pod["metadata"]["labels"][names.LABEL_JOB_NAME] == job]

    def report(self, pod: Json, status: Json) -> None:
        self.server.patch_status(names.PODS, "default", pod["metadata"]["name"], {"status": status})

    def start(self, pods: Iterable[Json]) -> None:
        for pod in pods:
            self.server.bind("default", pod["metadata"]["name"], "worker-1")
            self.report(pod, running(podIP="192.0.2.1"))

    async def run_all(self, attempt: int = 1) -> None:
        self.start(self.pods(attempt))
        await asyncio.sleep(2)
        assert self.status()["state"] == "Running"

    async def run_job(self, name: str = "mnist", **spec: Any) -> Json:
        """Submit a job, and run its pods; return it as it was created."""
        job = self.submit(name, **spec)
        await asyncio.sleep(1)
        await self.run_all()
        return job

    def sent(self, verb: str, resource: Resource) -> int:
        return sum(call.verb == verb and call.resource is resource for call in self.calls)

    def history(self) -> list[Any]:
        return list(self.cluster.store.changes_after(0))

    def events(self) -> list[str]:
        return [event["reason"] for event in self.cluster.store.all(names.EVENTS)]

    def reconciles(self) -> float:
        lines = self.metrics.render().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("ddpjob_reconcile_duration_seconds_count")
        )


def on_bench(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run ``test`` with a bench as its first argument, in simulated time."""

    @functools.wraps(test)
    def run_test(*args: Any, **given: Any) -> None:
        async def whole() -> None:
            bench = Bench()
            await bench.begin()
            try:
                await test(bench, *args, **given)
            finally:
                await bench.end()

        run(whole())

    _, *rest = inspect.signature(test).parameters.values()
    run_test.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined] # pytest passes no bench
    return run_test
