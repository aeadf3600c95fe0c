"""Pods as processes without an engine: tests create pods, stop them, and read their status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.local.pod_process import Machine, PodProcess
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
    """This machine, a state folder, and the pods that run."""

    state: StateFolder
    machine: Machine
    pods: dict[str, tuple[PodProcess, asyncio.Task[None]]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.machine.folder.path

    def create(self, pod: Json) -> str:
        """Start a pod. Raises ``LocalError`` if local mode cannot carry it out."""
        process = PodProcess(pod, self.machine, lambda: None)
        name = str(pod["metadata"]["name"])
        self.pods[name] = process, asyncio.create_task(process.run())
        return name

    def pod(self, name: str) -> Json:
        return self.pods[name][0].pod

    def stop(self, name: str) -> None:
        self.pods[name][0].stop()

    def log(self, name: str) -> str:
        path = self.machine.folder.log(name)
        return path.read_text() if path.exists() else ""

    def state_of(self, name: str) -> Json:
        """Return the state of the trainer: waiting, running or terminated."""
        found: Json = self.pod(name)["status"]["containerStatuses"][0]["state"]
        return found

    async def run(self, pod: Json) -> Json:
        """Create a pod, wait until it and its processes have ended, and return its status."""
        name = self.create(pod)
        await self.ended(name)
        status: Json = self.pod(name)["status"]
        return status

    async def ended(self, name: str) -> None:
        await asyncio.wait_for(self.pods[name][1], PATIENCE)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        await eventually_async(what, holds, timeout=PATIENCE)


@asynccontextmanager
async def a_bench(
    root: Path,
    documents: Sequence[Json] = (),
    volumes: dict[str, Path] | None = None,
    *,
    gpus: Sequence[str] = (),
    gpus_per_node: int = 0,
) -> AsyncIterator[Bench]:
    """Yield a bench; its pods are killed at the end of the block."""
    state, given = StateFolder(root), volumes or {}
    machine = Machine(
        folder=state.job("default", "mnist"),
        references=References(documents, "default"),
        ports=Ports(),
        claim_directory=lambda claim: given.get(claim, state.volume("default", claim)),
        directory=root,
        nodes=2,
        cpus=sorted(os.sched_getaffinity(0)),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
    )
    bench = Bench(state, machine)
    try:
        yield bench
    finally:
        for process, _ in bench.pods.values():
            process.kill()
        await asyncio.gather(*(task for _, task in bench.pods.values()))
