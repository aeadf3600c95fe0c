"""One job in a namespace of its own, with an operator of its own, and a fault at one of its writes."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.controller.operator_process import OperatorProcess
from tests.injection.cluster import WRITES, Cluster, path_of
from tests.injection.faults import CRASHES, ERRORS_IN_A_ROW, EXPIRED, FAULTS
from tests.simulator.faults import At
from tests.simulator.oracle import Outcome, check_history, outcome_of
from tests.simulator.simulation import KEY, JobView
from tests.worlds.fault_proxy import Fault
from tests.worlds.memory.store import Change

T = TypeVar("T")
QUIET_SECONDS = 1.0
NEVER = 86_400


class Run(JobView):
    """What the story of a job needs. Use as an async context manager, which starts and stops the operator.

    writes: method and path of the operator's writes in order. injected: how many times the fault was injected.
    struck: the write that got the fault.
    """

    def __init__(self, cluster: Cluster, namespace: str, fault: At | None = None) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.fault = fault
        self.writes: list[str] = []
        self.injected = 0
        self.operator = OperatorProcess(
            cluster.plane, namespace, server=cluster.proxy.server, sweep_interval_seconds=NEVER
        )
        self.struck = ""
        self._expires: set[str] = set()
        self._wrote_at = 0.0
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> "Run":
        self.cluster.rules[self.namespace] = self._rule
        self.operator.start(wait=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.operator.kill()
        del self.cluster.rules[self.namespace]

    # What a story waits for, does and reads.

    async def until(self, what: str, probe: Callable[[], T | None]) -> T:
        def text() -> str:
            return f"{what} ({self})\n{json.dumps(self.status())}\n" + "\n".join(self.writes)

        def checked() -> T | None:
            self.operator.check()
            return probe()

        return await self.cluster.history.until(self.namespace, text, checked)

    async def create_job(self, **spec: Any) -> Json:
        body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": {"name": KEY.name}}
        spec = {"image": "trainer:1", "numNodes": 2} | spec
        return await self.cluster.request("POST", names.DDPJOBS.path(self.namespace), body | {"spec": spec})

    async def patch_job(self, **spec: Any) -> None:
        await self.cluster.request("PATCH", f"{names.DDPJOBS.path(self.namespace)}/{KEY.name}", {"spec": spec})

    async def running_attempt(self, after: int = 0) -> dict[int, Json]:
        """Start the pods of an attempt with a higher number than ``after``, and return them when the job runs."""
        started: set[str] = set()
        while True:
            pods = await self.until("all pods exist", lambda: self._complete(after))
            number = self.attempt()
            for pod in pods.values():
                if pod["metadata"]["uid"] not in started:
                    started.add(pod["metadata"]["uid"])
                    await self.cluster.start(pod)
            await self.until(
                "the job runs",
                lambda number=number: self._all_ready() or self.attempt() != number,  # type: ignore[misc]
            )
            if self.attempt() == number:
                return pods

    async def finished(self) -> None:
        """Wait for the end. After a slow write of it the operator may already have deleted the job."""
        await self.until("the job is finished", lambda: self.job() is None or "completionTime" in self.status())

    async def quiet(self) -> None:
        """Wait until the operator has written nothing for ``QUIET_SECONDS``."""
        await self.until("the operator is quiet", lambda: time.monotonic() - self._wrote_at > QUIET_SECONDS)

    def job(self) -> Json | None:
        return self.cluster.history.get(names.DDPJOBS, self.namespace, KEY.name)

    def all_pods(self) -> list[Json]:
        return self.cluster.history.objects(names.PODS, self.namespace)

    def _complete(self, after: int) -> dict[int, Json] | None:
        pods, job = self.pods(), self.job()
        is_complete = job is not None and self.attempt() > after and len(pods) == job["spec"]["numNodes"]
        return pods if is_complete else None

    def _all_ready(self) -> bool:
        """Return whether the operator has recorded that all was created and runs."""
        status = self.status()
        is_running = status.get("state") == "Running" and (status.get("currentAttempt") or {}).get("phase") == "Running"
        return is_running and status["nodes"]["running"] == status["nodes"]["desired"]

    # The fault.

    def _rule(self, request: web.BaseRequest) -> Fault | None:
        """Return the fault of a request; called in the proxy's thread."""
        if request.query.get("watch") == "true" and request.path in self._expires:
            self._expires.discard(request.path)
            return Fault(status=200, body=EXPIRED)
        if request.method not in WRITES:
            return None
        self._wrote_at = time.monotonic()
        what = f"{request.method} {request.path}"
        if self.struck == what and self.fault and self.fault.kind == "errors" and self.injected < ERRORS_IN_A_ROW:
            self.injected += 1
            return FAULTS["errors"]
        self.writes.append(what)
        if self.fault is None or len(self.writes) != self.fault.write:
            return None
        self.injected, self.struck = 1, what
        self._strike(self.fault.kind)
        return FAULTS[self.fault.kind]

    def _strike(self, kind: str) -> None:
        watched = [f"/{resource.path(self.namespace)}" for resource in (names.DDPJOBS, names.PODS)]
        if kind in CRASHES:
            self.operator.send(signal.SIGKILL)
            self._loop.call_soon_threadsafe(self._restart)
        elif kind == "watch-expired":
            self._expires.update(watched)
        if kind.startswith("watch-"):
            for path in watched:
                self.cluster.proxy.cut(path)

    def _restart(self) -> None:
        self.operator.kill()
        self.operator.start(wait=False)

    # The oracle.

    def changes(self) -> list[tuple[float, Change]]:
        return self.cluster.history.changes(self.namespace)

    def outcome(self) -> Outcome:
        """Check the invariants. Return how the job ended, and how often each object was created and deleted."""
        changes = self.changes()
        check_history(changes)
        jobs = [change.obj for _, change in changes if change.resource is names.DDPJOBS]
        status = dict(jobs[-1].get("status") or {})
        whole = outcome_of(status, changes, _name)
        uid = jobs[0]["metadata"]["uid"]
        prefix = names.pod_name(KEY.name, uid, 1, 0).removesuffix("-1-0")
        return dict(json.loads(json.dumps(whole).replace(prefix, KEY.name)))

    def orphans(self) -> list[str]:
        """Return the objects whose owner does not exist."""
        job = self.job()
        uid = job["metadata"]["uid"] if job else ""
        objects = [
            (resource, obj)
            for resource in (names.PODS, names.SERVICES)
            for obj in self.cluster.history.objects(resource, self.namespace)
        ]
        return [
            path_of(resource, obj)
            for resource, obj in objects
            if [owner["uid"] for owner in obj["metadata"].get("ownerReferences", ())] != [uid]
        ]

    def __str__(self) -> str:
        return f"{self.namespace}, {self.fault or 'undisturbed'}"


def _name(change: Change) -> str:
    labels = change.obj["metadata"].get("labels") or {}
    return f"{labels[names.LABEL_ATTEMPT]}-{labels[names.LABEL_NODE_RANK]}" if change.resource is names.PODS else ""
