"""Pods as processes without an engine: tests create pods, stop them, and read their status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.api.objects import Json
from ddpjob.engine.desired import Job
from ddpjob.local.pod_process import Machine, PodProcess
from ddpjob.local.references import References
from ddpjob.local.state import HostPaths, StateFolder
from tests.builders import a_job
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
    pods: dict[str, PodProcess] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.machine.paths.record.path

    def create(self, pod: Json) -> str:
        """Start a pod. Raises ``LocalError`` if local mode cannot carry it out."""
        name = str(pod["metadata"]["name"])
        self.pods[name] = PodProcess(pod, self.machine, lambda: None)
        self.pods[name].start()
        return name

    def pod(self, name: str) -> Json:
        return self.pods[name].pod

    def stop(self, name: str) -> None:
        self.pods[name].stop()

    def log(self, name: str) -> str:
        path = self.machine.paths.record.log(name)
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
        await asyncio.wait_for(self.pods[name].task, PATIENCE)

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        await eventually_async(what, holds, timeout=PATIENCE)


@asynccontextmanager
async def a_bench(
    root: Path,
    documents: Sequence[Json] = (),
    volumes: dict[str, Path] | None = None,
    gpus: Sequence[str] = (),
    **spec: Any,
) -> AsyncIterator[Bench]:
    """Yield a bench of a job of two nodes; its pods are killed at the end of the block."""
    job = Job.of(a_job(**spec))
    paths = HostPaths(job, StateFolder(root), volumes or {})
    bench = Bench(paths.folder, Machine(paths, References(documents, "default"), root, gpus=gpus))
    try:
        yield bench
    finally:
        for process in bench.pods.values():
            process.kill()
        await asyncio.gather(*(process.task for process in bench.pods.values()))
