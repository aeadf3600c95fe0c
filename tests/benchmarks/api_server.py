"""A plain HTTP client of the API server, with a watch that records when each pod appears.

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
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from tests.controlplane import ControlPlane

SECONDS = 120.0
CONNECTIONS = 64
SETTLE_SECONDS = 1.0
"""Pause between two measurements, so that the clean-up after one does not slow the next."""


class WatchEndedError(Exception):
    """The watch ended, so some events were missed."""


@dataclass
class Pods:
    """The pods that a watch has seen since ``begin``; ``ms``: until the newest."""

    nodes: int
    begin: float
    seen: int = 0
    ms: float = 0.0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def saw_one(self) -> None:
        self.seen, self.ms = self.seen + 1, 1000 * (time.perf_counter() - self.begin)
        if self.seen == self.nodes:
            self.complete.set()


class ApiServer:
    """Creates jobs and pods in one namespace, and measures the time. Create with ``reached_by``."""

    def __init__(self, session: aiohttp.ClientSession, server: str, namespace: str) -> None:
        self._session = session
        self._server = server
        self._namespace = namespace
        self._watch: asyncio.Task[None] | None = None
        self._current: Pods | None = None
        self._run = ""
        self._names = (f"bench-{n}" for n in itertools.count())

    @classmethod
    @contextlib.asynccontextmanager
    async def reached_by(cls, plane: ControlPlane, namespace: str) -> AsyncIterator[Self]:
        """Connect and open the watch; close both at the end.

        Python's garbage collector, which would add up to 50 ms to some measurements, runs between them only.
        """
        trust = ssl.create_default_context(cafile=str(plane.ca_file))
        connector = aiohttp.TCPConnector(limit=0, ssl=trust, keepalive_timeout=60)
        headers = {"Authorization": f"Bearer {plane.admin_token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**21) as session:
            api = cls(session, plane.server, namespace)
            await api._open_watch()
            # The API server delays the first write to a new CRD by two seconds, which no user's job experiences.
            await api._post(names.DDPJOBS, json.dumps(job_of("first", 1)).encode(), "&dryRun=All")
            gc.disable()
            try:
                yield api
            finally:
                gc.enable()
                await api._close_watch()

    async def run_job(self, nodes: int) -> float:
        """POST a DDPJob, wait until all its pods exist, delete everything, and return the milliseconds."""
        return await self._measured(self._run_job, nodes)

    async def post_pods(self, nodes: int) -> float:
        """POST the pods that the operator would create at once, wait until they exist, and return the milliseconds."""
        return await self._measured(self._post_pods, nodes)

    async def _measured(self, measure: Callable[[int], Awaitable[float]], nodes: int) -> float:
        """Return a measurement; repeat it if the server closed the watch, which it does to slow ones."""
        while True:
            try:
                return await measure(nodes)
            except WatchEndedError as error:
                print(f"{error}: measuring again", file=sys.stderr)
                await self._clean_up(names.LABEL_JOB_NAME)
                await self._open_watch()

    async def _run_job(self, nodes: int) -> float:
        name = next(self._names)
        body = json.dumps(job_of(name, nodes)).encode()
        await self._warm(1)
        pods = self._start(name, nodes)
        await self._post(names.DDPJOBS, body)
        try:
            await self._until_complete(pods, name)
        finally:
            await self._delete(names.DDPJOBS, f"/{name}")
        await self._clean_up(f"{names.LABEL_JOB_NAME}={name}")
        return pods.ms

    async def _post_pods(self, nodes: int) -> float:
        name = next(self._names)
        bodies = pods_of(name, nodes, self._namespace)
        await self._warm(min(nodes, CONNECTIONS))
        pods = self._start(name, nodes)
        await asyncio.gather(*(self._post(names.PODS, body) for body in bodies))
        await self._until_complete(pods, name)
        await self._clean_up(f"{names.LABEL_JOB_NAME}={name}")
        return pods.ms

    def _start(self, name: str, nodes: int) -> Pods:
        self._run = name
        self._current = Pods(nodes, time.perf_counter())
        return self._current

    async def _until_complete(self, pods: Pods, name: str) -> None:
        seen = asyncio.create_task(pods.complete.wait())
        assert self._watch is not None
        await asyncio.wait({seen, self._watch}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._watch.done():
            self._watch.result()
        if not seen.done():
            seen.cancel()
            job = await self._get(f"{self._url(names.DDPJOBS)}/{name}")
            raise RuntimeError(f"{pods.seen} of {pods.nodes} pods after {SECONDS:g} s; status: {job.get('status')}")

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

    async def _open_watch(self) -> None:
        await self._close_watch()
        listed = await self._get(self._url(names.PODS))
        version = listed["metadata"]["resourceVersion"]
        opened = asyncio.Event()
        self._watch = asyncio.create_task(self._follow(version, opened))
        await asyncio.wait_for(opened.wait(), 30)

    async def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _follow(self, version: str, opened: asyncio.Event) -> None:
        url = f"{self._url(names.PODS)}?watch=1&resourceVersion={version}&timeoutSeconds=3600"
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            opened.set()
            async for line in answer.content:
                event = orjson.loads(line)
                labels = event["object"]["metadata"].get("labels") or {}
                if self._current and event["type"] == "ADDED" and labels.get(names.LABEL_JOB_NAME) == self._run:
                    self._current.saw_one()
        raise WatchEndedError("the watch on pods ended")

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
