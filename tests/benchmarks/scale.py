"""Measure what large jobs and many jobs cost the operator, on a real kube-apiserver and etcd.

    python -m tests.benchmarks.scale            # table on standard output
    python -m tests.benchmarks.scale --write    # and into docs/develop/benchmarks.md

Cases: one job of 1,000 nodes, one of 4,096, and 1,000 jobs of one node. Each case has a control plane and an operator
of its own. ``tests.worlds.nodes`` binds the pods and reports them as running; no container runs.

The times begin with the first POST of a job and end when all pods exist, and when the status of every job says that all
of its nodes run. Processor time and requests are those of the operator in this time, peak memory is that of its
process. The worst lag is the longest delay of a heartbeat of the operator's event loop, which beats once a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.benchmarks.api_server import ApiServer, job_of
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.controller.operator_process import OperatorProcess
from tests.kind import prepare
from tests.worlds.control_plane import control_plane
from tests.worlds.nodes import Nodes

CASES = ((1, 1000), (1, 4096), (1000, 1))
SECONDS = 900.0
SAMPLE_SECONDS = 0.5
POSTS = 16
NODES = 100
AIM_CPU_SECONDS, AIM_LAG_SECONDS = 3.0, 0.05
"""For one job of 1,000 nodes."""


@dataclass(frozen=True)
class Row:
    """The measurement of one case."""

    jobs: int
    nodes: int
    pods_s: float
    """Seconds until all pods exist."""
    running_s: float
    """Seconds until every job's status says that all nodes run."""
    cpu_s: float
    peak_mib: float
    worst_lag_ms: float
    reconciles: float
    requests_per_job: float

    @property
    def holds(self) -> bool:
        if (self.jobs, self.nodes) != (1, 1000):
            return True
        return self.cpu_s <= AIM_CPU_SECONDS and self.worst_lag_ms <= 1000 * AIM_LAG_SECONDS

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        return [
            f"{self.jobs:,}", f"{self.nodes:,}", f"{self.pods_s} s", f"{self.running_s} s", f"**{self.cpu_s} s**",
            f"{self.peak_mib:.0f} MiB", f"{self.worst_lag_ms:.0f} ms", f"{self.reconciles:,.0f}",
            f"{self.requests_per_job:,.1f}",
        ]  # fmt: skip


class Case:
    """Runs one case; the watches record what has happened."""

    def __init__(self, api: ApiServer, kubelet: Nodes, jobs: int, nodes: int) -> None:
        self._api = api
        self._kubelet = kubelet
        self._jobs = jobs
        self._nodes = nodes
        self._begin = 0.0
        self._pods: set[str] = set()
        self._running: set[str] = set()
        self._pods_s = 0.0
        self._running_s = 0.0
        self._worst_lag = 0.0
        self._done = asyncio.Event()

    async def run(self, operator: OperatorProcess) -> Row:
        """POST the jobs, wait until all run, and return the measurement."""
        versions = [(kind, await self._api.version(kind)) for kind in (names.PODS, names.DDPJOBS)]
        watches = [asyncio.create_task(self._watch(*since)) for since in versions]
        before, cpu = await self._metrics(operator), _cpu_seconds(operator)
        lag = asyncio.create_task(self._sample_lag(operator))
        try:
            self._begin = time.perf_counter()
            await self._post_jobs()
            await self._wait(watches)
            await asyncio.sleep(2 * SAMPLE_SECONDS)  # the heartbeat of this second
            after, used = await self._metrics(operator), _cpu_seconds(operator) - cpu
        finally:
            for task in (*watches, lag):
                task.cancel()
            await asyncio.gather(*watches, lag, return_exceptions=True)
        return Row(
            jobs=self._jobs,
            nodes=self._nodes,
            pods_s=round(self._pods_s, 1),
            running_s=round(self._running_s, 1),
            cpu_s=round(used, 1),
            peak_mib=round(_peak_mib(operator), 0),
            worst_lag_ms=round(1000 * self._worst_lag, 0),
            reconciles=_sum(after, "ddpjob_reconcile_duration_seconds_count")
            - _sum(before, "ddpjob_reconcile_duration_seconds_count"),
            requests_per_job=round((_requests(after) - _requests(before)) / self._jobs, 1),
        )

    async def _post_jobs(self) -> None:
        slots = asyncio.Semaphore(POSTS)

        async def post(number: int) -> None:
            async with slots:
                await self._api.post(names.DDPJOBS, json.dumps(job_of(f"scale-{number}", self._nodes)).encode())

        await asyncio.gather(*(post(number) for number in range(self._jobs)))

    async def _wait(self, watches: list[asyncio.Task[None]]) -> None:
        done = asyncio.create_task(self._done.wait())
        until = time.monotonic() + SECONDS
        while not done.done():
            await asyncio.wait({done, *watches}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            self._kubelet.check()
            for watch in watches:
                if watch.done():
                    watch.result()
            if time.monotonic() > until:
                raise RuntimeError(f"{len(self._pods)} pods, {len(self._running)} jobs run after {SECONDS:g} s")

    async def _watch(self, resource: names.Resource, version: str) -> None:
        async for event in self._api.events(resource, version):
            self._take(resource, event)

    def _take(self, resource: names.Resource, event: Json) -> None:
        obj, name = event["object"], event["object"]["metadata"]["name"]
        now = time.perf_counter() - self._begin
        if resource is names.PODS and event["type"] == "ADDED":
            self._pods.add(name)
            if len(self._pods) == self._jobs * self._nodes:
                self._pods_s = now
        elif resource is names.DDPJOBS and obj.get("status", {}).get("nodesReady") == f"{self._nodes}/{self._nodes}":
            self._running.add(name)
            if len(self._running) == self._jobs:
                self._running_s = now
                self._done.set()

    async def _sample_lag(self, operator: OperatorProcess) -> None:
        while True:
            lag = _sum(await self._metrics(operator), "ddpjob_event_loop_lag_seconds")
            self._worst_lag = max(self._worst_lag, lag)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _metrics(self, operator: OperatorProcess) -> str:
        async with self._api.session.get(f"http://127.0.0.1:{operator.port()}/metrics") as answer:
            return await answer.text()


def _cpu_seconds(operator: OperatorProcess) -> float:
    """Return the processor time that the process has used, in user and system mode (proc(5))."""
    fields = Path(f"/proc/{operator.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(operator: OperatorProcess) -> float:
    """Return the largest resident memory of the process so far."""
    lines = Path(f"/proc/{operator.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def _sum(metrics: str, name: str) -> float:
    """Return the sum of all series of a metric in the Prometheus text format."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _requests(metrics: str) -> float:
    return _sum(metrics, "ddpjob_api_request_duration_seconds_count")


async def measure(jobs: int, nodes: int) -> Row:
    """Run one case with a new control plane and a new operator."""
    places = [f"node-{number}" for number in range(NODES)]
    with control_plane() as plane, OperatorProcess(plane, "") as operator, Nodes(plane, places=places) as kubelet:
        async with ApiServer.reached_by(plane) as api:
            return await Case(api, kubelet, jobs, nodes).run(operator)


def main() -> int:
    """Measure and print. The exit code is 0 if the aims for one job of 1,000 nodes are met, else 1."""
    parser = parser_of("tests.benchmarks.scale", __doc__)
    cases = [f"{jobs}x{nodes}" for jobs, nodes in CASES]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="JOBSxNODES")
    options = parser.parse_args()
    prepare.ensure("etcd", "kube-apiserver")
    machine = describe_machine()
    rows = []
    for case in options.cases:
        jobs, _, nodes = case.partition("x")
        rows.append(asyncio.run(measure(int(jobs), int(nodes))))
        print(f"{case}: {rows[-1]}", file=sys.stderr, flush=True)
    heading = (
        "jobs", "nodes each", "all pods exist", "all run, in status", "CPU time", "peak memory", "worst lag",
        "reconciles", "requests per job",
    )  # fmt: skip
    shown = table_of(heading, [row.cells() for row in rows], names=0)
    print_table(options, "scale", f"{shown}\n\nMeasured on {machine}.")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
