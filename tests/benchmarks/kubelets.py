"""Scheduler and kubelets for pods without containers: each pod is bound to a node and becomes Running.

As in a cluster, a pod takes three writes: its binding, the status ContainerCreating, the status Running with an IP. The
requests are sent as fast as the API server answers, so they limit how fast the operator's watch delivers changes.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from tests.benchmarks.api_server import ApiServer

NODES = 100
REQUESTS = 16
"""Requests at a time, as a scheduler and a hundred kubelets have them."""


class Kubelets:
    """Takes pods with ``take`` and writes their binding and status until ``close``."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._pods: asyncio.Queue[Json] = asyncio.Queue()
        self._count = 0
        self._workers = [asyncio.create_task(self._work()) for _ in range(REQUESTS)]

    def take(self, pod: Json) -> None:
        """Start a pod that was created."""
        self._pods.put_nowait(pod)

    def check(self) -> None:
        """Raise the error of a request that failed."""
        for worker in self._workers:
            if worker.done():
                worker.result()

    async def close(self) -> None:
        """Stop starting pods."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            await self._start(await self._pods.get())

    async def _start(self, pod: Json) -> None:
        self._count += 1
        number, meta = self._count, pod["metadata"]
        url = f"{self._api.url(names.PODS)}/{meta['name']}"
        target = {"apiVersion": "v1", "kind": "Node", "name": f"node-{number % NODES}"}
        binding = {"metadata": {"name": meta["name"]}, "target": target}
        await self._api.send("POST", f"{url}/binding", json.dumps(binding).encode())
        containers = [container["name"] for container in pod["spec"]["containers"]]
        waiting: Json = {"waiting": {"reason": "ContainerCreating"}}
        await self._patch(url, _status("Pending", containers, waiting))
        ip = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        running: Json = {"running": {"startedAt": timestamp(datetime.now(UTC))}}
        address = {"podIP": ip, "podIPs": [{"ip": ip}]}
        await self._patch(url, _status("Running", containers, running, **address))

    async def _patch(self, url: str, status: Json) -> None:
        await self._api.send("PATCH", f"{url}/status", json.dumps(status).encode(), "application/merge-patch+json")


def _status(phase: str, containers: list[str], state: Json, **more: Any) -> Json:
    now, runs = timestamp(datetime.now(UTC)), phase == "Running"
    conditions = [
        {"type": kind, "status": "True" if runs or kind == "Initialized" else "False", "lastTransitionTime": now}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    ]
    conditions.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": now})
    statuses = [
        {"name": name, "ready": runs, "started": runs, "restartCount": 0, "image": "i", "imageID": "", "state": state}
        for name in containers
    ]
    return {"status": {"phase": phase, "conditions": conditions, "containerStatuses": statuses, **more}}
