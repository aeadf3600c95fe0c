"""Measure the memory of the operator's process: with many pods, and after many finished jobs.

    python -m tests.benchmarks.memory [--pods 20000] [--jobs 10000] [--json FILE] [--write]

The operator runs as in a deployment, against the in-memory cluster behind HTTP (``tests/worlds/memory/http.py``), so
that both fit on a small machine. Pods have the fields that an API server, a scheduler and a kubelet add.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.engine.desired import Job, desired_pods, desired_service
from ddpjob_operator.cluster.base import NotFound
from tests.benchmarks.operator_process import OperatorProcess
from tests.benchmarks.report import describe_machine, write_section
from tests.builders import SETTINGS, a_job, a_running_world
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.http import MemoryHttp

MIB = 2**20
NODES_PER_JOB = 100
ACTIVE_JOBS = 40
SWEEP_SECONDS = 5.0
PATIENCE_SECONDS = 1800.0
JUNK = [[] for _ in range(16_000)]
"""Part of every progress answer: as many objects as 64 KiB of JSON can hold."""


@dataclass
class Figures:
    """What was measured, in MiB of resident memory, and bytes."""

    machine: str
    pods: int = 0
    idle_mib: float = 0.0
    many_pods_mib: float = 0.0
    many_pods_peak_mib: float = 0.0
    jobs: int = 0
    after_jobs_mib: dict[int, float] = field(default_factory=dict)
    bytes_per_finished_job: float = 0.0


class Kubelet:
    """Reports every new pod as running, and ends it later if ``ends``. Its pods answer progress requests."""

    def __init__(self, cluster: MemoryCluster, *, ends: bool) -> None:
        self._cluster = cluster
        self._ends = ends
        self._number = 0
        self.finished = asyncio.Event()

    async def run(self) -> None:
        """Serve the pods that are created until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for event in self._cluster.watch(names.PODS):
                if event["type"] == "ADDED":
                    group.create_task(self._live(event["object"]["metadata"]))

    async def _live(self, meta: Json) -> None:
        with suppress(NotFound):
            self._report(meta, self.running())
            if self._ends:
                await asyncio.sleep(0.5)
                ended = {"exitCode": 0, "reason": "Completed", "finishedAt": timestamp(datetime.now(UTC))}
                self._report(meta, {"phase": "Succeeded", "containerStatuses": [_container({"terminated": ended})]})

    def _report(self, meta: Json, status: Json) -> None:
        self._cluster.server.patch_status(names.PODS, meta["namespace"], meta["name"], {"status": status})

    def running(self) -> Json:
        """Return the status of a running pod."""
        self._number += 1
        time_ = timestamp(datetime.now(UTC))
        kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
        return {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "hostIP": f"10.1.{self._number % 1000 // 250}.{self._number % 250}",
            "startTime": time_,
            "conditions": [{"type": k, "status": "True", "lastTransitionTime": time_} for k in kinds],
            "containerStatuses": [_container({"running": {"startedAt": time_}})],
        }


def _container(state: Json) -> Json:
    image = "registry.example/team/trainer:1"
    return {
        "name": names.TRAINER_CONTAINER, "state": state, "ready": True, "restartCount": 0, "image": image,
        "imageID": f"{image}@sha256:{'0' * 64}", "containerID": f"containerd://{'0' * 64}",
    }  # fmt: skip


async def _answer_progress(request: web.BaseRequest) -> web.Response:
    del request
    return web.json_response({"step": int(time.time()), "totalSteps": 10**9, "phase": "train", "other": JUNK})


class Bench:
    """The in-memory cluster, its HTTP server, and the operator that runs against it."""

    def __init__(self, folder: Path, figures: Figures) -> None:
        self.cluster = MemoryCluster()
        self.figures = figures
        self._folder = folder
        self._progress_port = 0

    async def __aenter__(self) -> Bench:
        self._http = await MemoryHttp(self.cluster).__aenter__()
        self._trainers = web.ServerRunner(web.Server(_answer_progress), shutdown_timeout=0.5)
        await self._trainers.setup()
        await web.TCPSite(self._trainers, "127.0.0.1", 0).start()
        self._progress_port = int(self._trainers.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._trainers.cleanup()
        await self._http.__aexit__()

    def operator(self) -> OperatorProcess:
        """Return the operator, not yet started."""
        return OperatorProcess(self._http.kubeconfig(self._folder), f"--sweep-interval-seconds={SWEEP_SECONDS:g}")

    def submit(self, name: str, nodes: int) -> None:
        """Create a job."""
        spec = {"image": "trainer:1", "numNodes": nodes, "rendezvous": {"progressPort": self._progress_port}}
        body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": {"name": name}, "spec": spec}
        self.cluster.server.create(names.DDPJOBS, "default", body)

    def status(self, name: str) -> Json:
        job = self.cluster.store.get(names.DDPJOBS, "default", name) or {}
        return job.get("status") or {}

    def count(self, resource: names.Resource) -> int:
        return sum(1 for _ in self.cluster.store.all(resource))

    async def until(self, what: str, holds: Callable[[], Any], *, every: float = 0.5) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                raise SystemExit(f"timed out: {what}")
            await asyncio.sleep(every)


def add_running_job(cluster: MemoryCluster, name: str, nodes: int, status: Json, kubelet: Kubelet) -> None:
    """Store a job with its Service and pods as they are while all pods run."""
    body = a_job(name, numNodes=nodes)
    body["metadata"] |= {"uid": str(uuid.uuid4())}
    job = Job.of(body)
    cluster.store.put(names.DDPJOBS, body | {"status": status})
    for create in (desired_service(job), *desired_pods(job, 1, SETTINGS)):
        meta = create.body["metadata"] | {"uid": str(uuid.uuid4()), "generation": 1}
        meta["managedFields"] = [{"manager": "kubelet", "fieldsV1": {f"f:{n}": {} for n in range(60)}}]
        obj = create.body | {"metadata": meta}
        if create.resource is names.PODS:
            obj["spec"] = obj["spec"] | {"nodeName": "worker-1", "schedulerName": "default-scheduler", "priority": 0}
            obj["status"] = kubelet.running()
        cluster.store.put(create.resource, obj)


async def measure_pods(bench: Bench, pods: int) -> None:
    """Start the operator beside jobs of 100 nodes with ``pods`` running pods, and let it list them several times."""
    figures = bench.figures
    with bench.operator() as operator:
        await asyncio.to_thread(operator.wait_until_ready, PATIENCE_SECONDS)
        figures.idle_mib = operator.memory()[0] / MIB
    status = a_running_world(a_job(numNodes=NODES_PER_JOB)).status
    kubelet = Kubelet(bench.cluster, ends=False)
    for number in range(pods // NODES_PER_JOB):
        add_running_job(bench.cluster, f"wide-{number}", NODES_PER_JOB, status, kubelet)
        await asyncio.sleep(0)
    figures.pods = bench.count(names.PODS)
    version = bench.cluster.store.version
    with bench.operator() as operator:
        await asyncio.to_thread(operator.wait_until_ready, PATIENCE_SECONDS)
        await asyncio.sleep(4 * SWEEP_SECONDS)
        figures.many_pods_mib, figures.many_pods_peak_mib = (value / MIB for value in operator.memory())
    if bench.count(names.PODS) != figures.pods:
        raise SystemExit("the operator created or deleted pods, so it did not take the jobs for running ones")
    print(f"{bench.cluster.store.version - version} writes of the operator", file=sys.stderr)


async def measure_jobs(bench: Bench, jobs: int) -> None:
    """Run ``jobs`` jobs of one node to their end and delete them; measure the memory ten times on the way."""
    kubelet = asyncio.create_task(Kubelet(bench.cluster, ends=True).run())
    slots = asyncio.Semaphore(ACTIVE_JOBS)
    figures = bench.figures

    async def live(name: str) -> None:
        async with slots:
            bench.submit(name, 1)
            await bench.until(
                f"{name} has succeeded", lambda: bench.status(name).get("state") == "Succeeded", every=0.1
            )
            bench.cluster.server.delete(names.DDPJOBS, "default", name)

    with bench.operator() as operator:
        await asyncio.to_thread(operator.wait_until_ready, PATIENCE_SECONDS)
        step = max(jobs // 10, 1)
        for start in range(0, jobs, step):
            await asyncio.gather(*(live(f"job-{number}") for number in range(start, start + step)))
            await bench.until("the objects are collected", lambda: not bench.count(names.SERVICES))
            await asyncio.sleep(2 * SWEEP_SECONDS)
            figures.after_jobs_mib[start + step] = operator.memory()[0] / MIB
            print(f"{start + step} jobs: {figures.after_jobs_mib[start + step]:.1f} MiB", file=sys.stderr)
    kubelet.cancel()
    done = sorted(figures.after_jobs_mib)
    figures.jobs = done[-1]
    # The second half: before it, caches with an upper bound (such as the uids of deleted objects) are still filling.
    half, last = done[len(done) // 2 - 1], done[-1]
    growth = (figures.after_jobs_mib[last] - figures.after_jobs_mib[half]) * MIB
    figures.bytes_per_finished_job = growth / max(last - half, 1)


def table(figures: Figures) -> str:
    """Return the figures as a Markdown table."""
    rows = []
    if figures.pods:
        rows += [
            ("operator, idle", f"{figures.idle_mib:.0f}"),
            (f"{figures.pods:,} running pods", f"{figures.many_pods_mib:.0f}"),
            ("the same, maximum", f"{figures.many_pods_peak_mib:.0f}"),
        ]
    rows += [
        (f"after {count:,} finished and deleted jobs", f"{figures.after_jobs_mib[count]:.0f}")
        for count in sorted(figures.after_jobs_mib)[4::5]
    ]
    lines = ["| State | Resident memory, MiB |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    if figures.jobs:
        lines += ["", f"Growth in the second half: {figures.bytes_per_finished_job:.0f} bytes per finished job."]
    return "\n".join([*lines, "", figures.machine])


async def measure(pods: int, jobs: int) -> Figures:
    figures = Figures(describe_machine(kubernetes=False))
    with tempfile.TemporaryDirectory(prefix="ddpjob-memory-") as folder:
        for amount, measured in ((pods, measure_pods), (jobs, measure_jobs)):
            if amount:
                async with Bench(Path(folder), figures) as bench:
                    await measured(bench, amount)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=20_000, help="0 leaves this part out")
    parser.add_argument("--jobs", type=int, default=10_000, help="0 leaves this part out")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--write", action="store_true", help="write the table into docs/develop/benchmarks.md")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.pods, options.jobs))
    print(table(figures))
    if options.write:
        write_section("memory", table(figures))
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
