"""Measure what one tenant's large jobs cost the operator, and how long another tenant's job waits beside them.

    python -m tests.benchmarks.tenants [--jobs 1000] [--repetitions 20] [--write]

The operator runs as in a deployment, against the in-memory cluster behind HTTP. A thousand real jobs of 1.38 MB would
need a server with 50 GB of memory, so the server stores a placeholder and inserts the same large part into every
response and event: the operator receives the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.spec import MAX_VALUES
from tests.benchmarks.operator_process import OperatorProcess
from tests.benchmarks.report import describe_machine, write_section
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.http import MemoryHttp

MIB = 2**20
SWEEP_SECONDS = 30.0
EDITS_PER_SECOND = 5
PATIENCE_SECONDS = 900.0
PARTS = {
    "none": b"[]",
    "1.38 MB, refused": b"[" + b"{}," * 455_000 + b"{}]",
    "256 KiB, accepted": b"[" + b"{}," * (MAX_VALUES - 1_000) + b'"' + b"x" * 190_000 + b'"]',
}
"""What a tenant writes into the template of its jobs."""


class LargeParts(MemoryHttp):
    """Replaces the placeholder of the stored jobs by a large part."""

    def __init__(self, cluster: MemoryCluster, part: bytes) -> None:
        super().__init__(cluster)
        self._part = part

    def encode(self, value: Any) -> bytes:
        return super().encode(value).replace(b'"<part>"', self._part)


@dataclass
class Figures:
    """Of one kind of large job: MiB of resident memory, CPU seconds per minute, and milliseconds."""

    kind: str
    jobs: int
    resident_mib: float
    peak_mib: float
    restarted_peak_mib: float
    waits_ms: list[float]
    waits_while_edited_ms: list[float]


def a_job(namespace: str, name: str, spec: Json) -> Json:
    meta = {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "generation": 1}
    return {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": meta, "spec": spec}


class Bench:
    """The cluster with the jobs of two tenants, ``large`` and ``other``."""

    def __init__(self, kind: str, jobs: int) -> None:
        self.cluster = MemoryCluster()
        for namespace in ("large", "other"):
            self.cluster.create_namespace(namespace)
        self.kind = kind
        self.jobs = jobs
        self.http = LargeParts(self.cluster, PARTS[kind])

    def add_large_jobs(self) -> None:
        """Store the jobs of the first tenant: suspended, so that nothing else of them costs anything."""
        spec = {"image": "i", "suspend": True, "template": {"spec": {"x": "<part>"}}}
        for number in range(self.jobs):
            self.cluster.store.put(names.DDPJOBS, a_job("large", f"large-{number}", spec))

    async def until_all_have_a_status(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((job.get("status") or {}).get("state") for job in self.cluster.store.all(names.DDPJOBS, "large")):
            if time.monotonic() > deadline:
                raise SystemExit("the operator did not handle every job")
            await asyncio.sleep(0.5)

    async def waits(self, repetitions: int) -> list[float]:
        """Return the milliseconds until the pod of a job of the other tenant exists, one job after the other."""
        found = []
        for _ in range(repetitions):
            name = f"job-{uuid.uuid4().hex[:8]}"
            watch = self.cluster.watch(names.PODS, "other")
            began = time.perf_counter()
            self.cluster.store.put(names.DDPJOBS, a_job("other", name, {"image": "i"}))
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for event in watch:
                    if event["object"]["metadata"]["name"].startswith(name):
                        break
            found.append(1000 * (time.perf_counter() - began))
            watch.close()
            self.cluster.server.delete(names.DDPJOBS, "other", name)
            await asyncio.sleep(0.3)
        return found

    async def edit(self) -> None:
        """Annotate one of the large jobs, and edit the spec of another, several times a second until cancelled."""
        number = 0
        while True:
            number += 1
            for name, change in (("large-0", "annotation"), ("large-1", "spec")):
                job = self.cluster.store.get(names.DDPJOBS, "large", name)
                assert job is not None
                if change == "annotation":
                    meta = job["metadata"] | {"annotations": {"number": str(number)}}
                    edited = job | {"metadata": meta}
                else:
                    meta = job["metadata"] | {"generation": number + 1}
                    edited = job | {"metadata": meta, "spec": job["spec"] | {"activeDeadlineSeconds": number}}
                self.cluster.store.put(names.DDPJOBS, edited)
            await asyncio.sleep(1 / EDITS_PER_SECOND)


@asynccontextmanager
async def _editing(bench: Bench) -> AsyncIterator[None]:
    task = asyncio.create_task(bench.edit())
    try:
        yield
    finally:
        task.cancel()


async def measure(kind: str, jobs: int, repetitions: int) -> Figures:
    """Return the figures of one kind of large job."""
    bench = Bench(kind, jobs)
    bench.add_large_jobs()
    with tempfile.TemporaryDirectory(prefix="ddpjob-tenants-") as folder:
        async with bench.http:
            config = bench.http.kubeconfig(Path(folder))
            flags = (f"--sweep-interval-seconds={SWEEP_SECONDS:g}",)
            with OperatorProcess(config, *flags) as operator:
                await asyncio.to_thread(operator.wait_until_ready, PATIENCE_SECONDS)
                await bench.until_all_have_a_status()
                waits = await bench.waits(repetitions)
                async with _editing(bench):
                    waits_while_edited = await bench.waits(repetitions)
                await asyncio.sleep(SWEEP_SECONDS)
                resident, peak = operator.memory()
            with OperatorProcess(config, *flags) as operator:
                await asyncio.to_thread(operator.wait_until_ready, PATIENCE_SECONDS)
                await asyncio.sleep(SWEEP_SECONDS + 10)
                restarted = operator.memory()[1]
    sizes = [size / MIB for size in (resident, peak, restarted)]
    return Figures(kind, jobs, *sizes, waits, waits_while_edited)


def table(found: list[Figures]) -> str:
    """Return the figures as a Markdown table."""
    head = (
        "| first tenant's jobs | operator's memory | maximum | maximum after a restart | second tenant's pod after "
        "| the same while two jobs are edited | slowest |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    rows = []
    for f in found:
        jobs = f"{f.jobs:,} of {f.kind}" if f.jobs else "none"
        sizes = " | ".join(f"{mib:.0f} MiB" for mib in (f.resident_mib, f.peak_mib, f.restarted_peak_mib))
        waits = " | ".join(f"{statistics.median(ms):.1f} ms" for ms in (f.waits_ms, f.waits_while_edited_ms))
        rows.append(f"| {jobs} | {sizes} | {waits} | {max(f.waits_while_edited_ms):.1f} ms |")
    return "\n".join([head, *rows, "", describe_machine(kubernetes=False)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--write", action="store_true", help="write the table into docs/develop/benchmarks.md")
    options = parser.parse_args()
    found = []
    for kind in options.kinds:
        found.append(asyncio.run(measure(kind, options.jobs if kind != "none" else 2, options.repetitions)))
        print(table(found[-1:]), flush=True)
    if options.write:
        write_section("tenants", table(found))


if __name__ == "__main__":
    main()
