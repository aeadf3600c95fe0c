"""A plain HTTP client of the API server, with watches that record when each pod appears.

It uses neither the operator's client nor a client library, so the floor that it measures is the cost of the server and
of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import json
import ssl
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import aiohttp
import orjson

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from tests.worlds.control_plane import ControlPlane

SECONDS = 120.0
CONNECTIONS = 64
SETTLE_SECONDS = 1.0
"""Pause between two measurements, so that the clean-up after one does not slow the next."""


@dataclass(frozen=True)
class JobKind:
    """A kind of job that an operator turns into pods.

    body: returns the object for a name and a number of nodes.
    label: of the pods and Services; its value is the job's name.
    """

    resource: names.Resource
    body: Callable[[str, int], Json]
    label: str


class WatchEndedError(Exception):
    """A watch ended, so some events were missed."""


@dataclass
class Timeline:
    """The times of the watches' events, in milliseconds after the request was sent."""

    nodes: int
    begin: float = 0.0
    pods: list[float] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total_ms(self) -> float:
        return self.pods[-1]

    def saw_pod(self) -> None:
        self.pods.append(self._now())
        if len(self.pods) == 1:
            self.stages_ms["first pod"] = self.pods[0]
        if len(self.pods) == self.nodes:
            self.stages_ms["last pod"] = self.pods[-1]
            self.complete.set()

    def saw(self, stage: str) -> None:
        self.stages_ms.setdefault(stage, self._now())

    def _now(self) -> float:
        return 1000 * (time.perf_counter() - self.begin)


class ApiServer:
    """Creates jobs and pods in one namespace, and measures the time. Create with ``reached_by``."""

    watched: ClassVar[Sequence[names.Resource]] = (names.PODS, names.DDPJOBS, names.SERVICES)

    def __init__(self, session: aiohttp.ClientSession, server: str, namespace: str) -> None:
        self._session = session
        self._server = server
        self._namespace = namespace
        self._watches: list[asyncio.Task[None]] = []
        self._current: Timeline | None = None
        self._run = ""
        self._label = ""
        self._names = (f"bench-{n}" for n in itertools.count())

    @classmethod
    @contextlib.asynccontextmanager
    async def reached_by(cls, plane: ControlPlane, namespace: str) -> AsyncIterator[Self]:
        """Connect and open the watches; close both at the end.

        Python's garbage collector, which would add up to 50 ms to some measurements, runs between them only.
        """
        trust = ssl.create_default_context(cafile=str(plane.ca_file))
        connector = aiohttp.TCPConnector(limit=0, ssl=trust, keepalive_timeout=60)
        headers = {"Authorization": f"Bearer {plane.admin_token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**21) as session:
            api = cls(session, plane.server, namespace)
            await api._open_watches()
            # The API server delays the first write to a new CRD by two seconds, which no user's job experiences.
            await api._post(names.DDPJOBS, json.dumps(job_of("first", 1)).encode(), "&dryRun=All")
            gc.disable()
            try:
                yield api
            finally:
                gc.enable()
                await api._close_watches()

    async def run_job(self, nodes: int, kind: JobKind | None = None) -> Timeline:
        """POST a job, by default a DDPJob, wait until all its pods exist, delete everything, and return the times."""
        return await self._measured(partial(self._run_job, kind or DDPJOB), nodes)

    async def post_pods(self, nodes: int) -> Timeline:
        """POST the pods that the operator would create, all at once, wait until they exist, and return the times."""
        return await self._measured(self._post_pods, nodes)

    async def _measured(self, measure: Callable[[int], Awaitable[Timeline]], nodes: int) -> Timeline:
        """Return a measurement; repeat it if the server closed a watch, which it does to slow ones."""
        while True:
            try:
                return await measure(nodes)
            except WatchEndedError as error:
                print(f"{error}: measuring again", file=sys.stderr)
                await self._clean_up(self._label)
                await self._open_watches()

    async def _run_job(self, kind: JobKind, nodes: int) -> Timeline:
        name = next(self._names)
        body = json.dumps(kind.body(name, nodes)).encode()
        await self._warm(1)
        timeline = self._start(name, nodes, kind.label)
        await self._post(kind.resource, body)
        timeline.saw("job's POST answered")
        try:
            await self._until_complete(timeline, kind.resource, name)
        finally:
            await self._delete(kind.resource, f"/{name}")
        await self._clean_up(f"{kind.label}={name}")
        return timeline

    async def _post_pods(self, nodes: int) -> Timeline:
        name = next(self._names)
        bodies = pods_of(name, nodes, self._namespace)
        await self._warm(min(nodes, CONNECTIONS))
        timeline = self._start(name, nodes, names.LABEL_JOB_NAME)
        await asyncio.gather(*(self._post(names.PODS, body) for body in bodies))
        await self._until_complete(timeline, names.DDPJOBS, name)
        await self._clean_up(f"{names.LABEL_JOB_NAME}={name}")
        return timeline

    def _start(self, name: str, nodes: int, label: str) -> Timeline:
        self._run, self._label = name, label
        self._current = Timeline(nodes)
        self._current.begin = time.perf_counter()
        return self._current

    async def _until_complete(self, timeline: Timeline, resource: names.Resource, name: str) -> None:
        seen = asyncio.create_task(timeline.complete.wait())
        await asyncio.wait({seen, *self._watches}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for watch in self._watches:
            if watch.done():
                watch.result()
        if not seen.done():
            seen.cancel()
            job = await self._get(f"{self._url(resource)}/{name}")
            raise RuntimeError(
                f"{len(timeline.pods)} of {timeline.nodes} pods after {SECONDS:g} s; status: {job.get('status')}"
            )

    async def _warm(self, connections: int) -> None:
        """Open connections, as a process that has run for a while has them open."""
        await asyncio.gather(*(self._get(f"{self._server}/api/v1") for _ in range(connections)))

    async def _clean_up(self, selector: str) -> None:
        await self._delete(names.PODS, f"?labelSelector={selector}&gracePeriodSeconds=0")
        services = await self._get(f"{self._url(names.SERVICES)}?labelSelector={selector}")
        for service in services["items"]:
            await self._delete(names.SERVICES, f"/{service['metadata']['name']}")
        gc.collect()
        await asyncio.sleep(SETTLE_SECONDS)

    async def _open_watches(self) -> None:
        await self._close_watches()
        for resource in self.watched:
            listed = await self._get(self._url(resource))
            version = listed["metadata"]["resourceVersion"]
            url = f"{self._url(resource)}?watch=1&resourceVersion={version}&timeoutSeconds=3600"
            opened = asyncio.Event()
            self._watches.append(asyncio.create_task(self._watch(resource, url, opened)))
            await asyncio.wait_for(opened.wait(), 30)

    async def _close_watches(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches.clear()

    async def _watch(self, resource: names.Resource, url: str, opened: asyncio.Event) -> None:
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            opened.set()
            async for line in answer.content:
                self._take(resource, orjson.loads(line))
        raise WatchEndedError(f"the watch on {resource.plural} ended")

    def _take(self, resource: names.Resource, event: Json) -> None:
        meta = event["object"]["metadata"]
        if self._current is None:
            return
        if resource is names.DDPJOBS:
            if meta["name"] == self._run and event["object"].get("status", {}).get("attempt"):
                self._current.saw("attempt recorded")
        elif event["type"] == "ADDED" and (meta.get("labels") or {}).get(self._label) == self._run:
            if resource is names.PODS:
                self._current.saw_pod()
            else:
                self._current.saw("Service")

    def _url(self, resource: names.Resource) -> str:
        return f"{self._server}/{resource.path(self._namespace)}"

    async def _post(self, resource: names.Resource, body: bytes, options: str = "") -> Json:
        url = f"{self._url(resource)}?fieldValidation=Strict{options}"
        return await self._answer(self._session.post(url, data=body))

    async def _get(self, url: str) -> Json:
        return await self._answer(self._session.get(url))

    async def _delete(self, resource: names.Resource, rest: str) -> None:
        await self._answer(self._session.delete(self._url(resource) + rest))

    async def _answer(self, request: Any) -> Json:
        async with asyncio.timeout(SECONDS), request as response:
            answer = await response.read()
            if response.status >= 300:
                raise RuntimeError(f"{response.method} {response.url}: {response.status} {answer[:500]!r}")
            decoded: Json = orjson.loads(answer)
            return decoded


def job_of(name: str, nodes: int) -> Json:
    """Return a job of ordinary size: limits, a variable, an existing checkpoint claim."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "metadata": {"name": name},
        "spec": {
            "image": "ddpjob/trainer:0.1.0",
            "args": ["train", "--epochs", "2"],
            "numNodes": nodes,
            "nprocPerNode": 8,
            "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 16, "memory": "64Gi"}},
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "checkpoint": {"claimName": "checkpoints"},
        },
    }


DDPJOB = JobKind(names.DDPJOBS, job_of, names.LABEL_JOB_NAME)


def pods_of(name: str, nodes: int, namespace: str) -> list[bytes]:
    """Return the encoded pods that the operator creates for that job, except for the label that it watches."""
    body = job_of(name, nodes)
    body["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4()), "generation": 1}
    job = Job.of(body)
    bodies = []
    for create in desired_pods(job, 1, EngineSettings()):
        pod = copy.deepcopy(create.body)
        # Otherwise the operator would watch these pods too, and its work would slow the floor.
        labels = pod["metadata"]["labels"]
        labels[f"{names.GROUP}/run-uid"] = labels.pop(names.LABEL_JOB_UID)
        bodies.append(json.dumps(pod).encode())
    return bodies
