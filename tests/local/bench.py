"""A kubelet on an in-memory cluster without a controller: tests create pods and read their status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.local.kubelet import Kubelet, Machine
from ddpjob.local.references import References
from ddpjob.local.resources import Ports
from ddpjob.local.state import StateFolder
from tests.processes import eventually_async

MARKER = "DDPJOB_TEST_MARKER"
PATIENCE = 60.0


def marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment, except zombies and those that end meanwhile."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARKER}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@dataclass
class Bench:
    """A kubelet and the state folder that it uses."""

    cluster: MemoryCluster
    kubelet: Kubelet
    state: StateFolder
    task: asyncio.Task[None]

    @property
    def folder(self) -> Path:
        return self.state.job("default", "mnist").path

    def create(self, pod: Json) -> str:
        self.cluster.server.create(names.PODS, "default", pod)
        return str(pod["metadata"]["name"])

    def pod(self, name: str) -> Json:
        return self.cluster.server.get(names.PODS, "default", name)

    def delete(self, name: str, grace: int | None = None) -> None:
        self.cluster.server.delete(names.PODS, "default", name, grace_seconds=grace)

    def log(self, name: str, container: str = "trainer") -> str:
        path = self.state.job("default", "mnist").log(name, container)
        return path.read_text() if path.exists() else ""

    def state_of(self, name: str, container: str = "trainer") -> Json:
        """Return the state of a container: waiting, running or terminated."""
        status = self.pod(name)["status"]
        every = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
        found: Json = next((s["state"] for s in every if s["name"] == container), {})
        return found

    async def run(self, pod: Json) -> Json:
        """Create a pod, wait until it and its processes have ended, and return its status."""
        name = self.create(pod)
        await self.until("the pod has ended", lambda: self.pod(name)["status"]["phase"] in ("Succeeded", "Failed"))
        await self.until("its kubelet is at rest", lambda: not self.kubelet.is_busy)
        status: Json = self.pod(name)["status"]
        return status

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        if self.task.done():
            self.task.result()
        await eventually_async(what, holds, timeout=PATIENCE)

    def is_gone(self, name: str) -> bool:
        return self.cluster.store.get(names.PODS, "default", name) is None


@asynccontextmanager
async def running_kubelet(
    root: Path, documents: Sequence[Json] = (), volumes: dict[str, Path] | None = None
) -> AsyncIterator[Bench]:
    """Yield a bench; its processes end with the block."""
    cluster, state = MemoryCluster(), StateFolder(root)
    given = volumes or {}
    machine = Machine(
        server=cluster.server,
        folder=state.job("default", "mnist"),
        references=References(documents, "default"),
        ports=Ports(rendezvous=29500, progress=29501),
        claim_directory=lambda claim: given.get(claim, state.volume("default", claim)),
        directory=root,
        domain="cluster.local",
        nodes=2,
        available=sorted(os.sched_getaffinity(0)),
    )
    kubelet = Kubelet(cluster, machine, lambda: None)
    task = asyncio.create_task(kubelet.run())
    try:
        yield Bench(cluster, kubelet, state, task)
    finally:
        task.cancel()
        await asyncio.wait([task])
