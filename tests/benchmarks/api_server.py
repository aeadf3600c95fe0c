"""A plain HTTP client of the API server, and the jobs of the benchmarks.

It uses neither the operator's client nor a client library, so what it measures is the cost of the server and of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Self

import aiohttp
import msgspec

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.worlds.control_plane import ControlPlane

NAMESPACE = "default"
SECONDS = 120.0


class ApiServer:
    """Sends requests about one namespace. Create with ``reached_by``; ``opened`` is set once a watch is open."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self.session, self.server = session, server
        self.opened = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def reached_by(cls, plane: ControlPlane) -> AsyncIterator[Self]:
        """Connect, and close the connections at the end."""
        trust = ssl.create_default_context(cafile=str(plane.ca_file))
        connector = aiohttp.TCPConnector(limit=0, ssl=trust, keepalive_timeout=60)
        headers = {"Authorization": f"Bearer {plane.admin_token}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=2**22) as session:
            api = cls(session, plane.server)
            # The API server delays the first write to a new CRD by two seconds, which no user's job experiences.
            await api.post(names.DDPJOBS, json.dumps(job_of("first", 1)).encode(), "&dryRun=All")
            yield api

    def url(self, resource: names.Resource) -> str:
        return f"{self.server}/{resource.path(NAMESPACE)}"

    async def post(self, resource: names.Resource, body: bytes, options: str = "") -> Json:
        return await self.send("POST", f"{self.url(resource)}?fieldValidation=Strict{options}", body)

    async def get(self, url: str) -> Json:
        return await self.send("GET", url)

    async def delete(self, resource: names.Resource, rest: str) -> None:
        await self.send("DELETE", self.url(resource) + rest)

    async def send(self, method: str, url: str, body: bytes | None = None, kind: str = "application/json") -> Json:
        """Send a request, and return its decoded answer. Raises ``RuntimeError`` if the server refuses it."""
        request = self.session.request(method, url, data=body, headers={"Content-Type": kind})
        async with asyncio.timeout(SECONDS), request as response:
            answer = await response.read()
            if response.status >= 300:
                raise RuntimeError(f"{method} {url}: {response.status} {answer[:500]!r}")
            decoded: Json = msgspec.json.decode(answer)
            return decoded

    async def version(self, resource: names.Resource) -> str:
        """Return the resourceVersion of the newest change."""
        return str((await self.get(self.url(resource)))["metadata"]["resourceVersion"])

    async def events(self, resource: names.Resource, version: str) -> AsyncIterator[Json]:
        """Yield all events after a version; go on where the watch ended if the server closes it, as slow ones."""
        while True:
            url = f"{self.url(resource)}?watch=1&resourceVersion={version}&timeoutSeconds=3600"
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                answer.raise_for_status()
                self.opened.set()
                async for line in answer.content:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"the watch on {resource.plural} failed: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event


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
