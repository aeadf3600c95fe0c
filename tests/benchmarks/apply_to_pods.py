"""Measure the time from the POST of a job until all its pods exist, and the least time that the API server needs.

    python -m tests.benchmarks.apply_to_pods            # table on standard output
    python -m tests.benchmarks.apply_to_pods --write    # and into docs/develop/benchmarks.md

kube-apiserver, etcd and the operator run as separate processes. The floor is the time for the same pods, POSTed
concurrently without an operator by one HTTP client with open connections and encoded bodies. One watch, opened before,
records the pods of both. Floor and operator alternate within each repetition, so that a busy machine slows both. The
result is the median.

The target is floor × 1.5 + 15 ms at every size.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import json
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ddpjob.api import names
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from tests.benchmarks.api_server import NAMESPACE, SECONDS, ApiServer, job_of
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.controller.operator_process import OperatorProcess
from tests.kind import prepare
from tests.worlds.control_plane import control_plane

CONNECTIONS = 64
SETTLE_SECONDS = 1.0
"""Pause between two measurements, so that the clean-up after one does not slow the next."""
SIZES = (1, 8, 32, 64)
REPETITIONS = 9
FACTOR, CONSTANT_MS = 1.5, 15


@dataclass
class Size:
    """The milliseconds for one number of nodes; ``first``: of the first run, without warm code and connections."""

    nodes: int
    first: float = 0.0
    floor: list[float] = field(default_factory=list)
    operator: list[float] = field(default_factory=list)

    @property
    def aim(self) -> float:
        return FACTOR * median(self.floor) + CONSTANT_MS

    @property
    def holds(self) -> bool:
        return median(self.operator) <= self.aim

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        middle, verdict = f"**{median(self.operator):,.1f} ms**", "held" if self.holds else "missed"
        others = [f"{max(self.operator):,.1f} ms", f"{self.first:,.1f} ms"]
        return [str(self.nodes), f"{median(self.floor):,.1f} ms", middle, f"{self.aim:,.1f} ms ({verdict})", *others]


class Measured:
    """Creates jobs or pods, and measures the milliseconds until a watch has seen all pods."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._names = (f"bench-{n}" for n in itertools.count())
        self._run, self._missing, self._seen = "", 0, asyncio.Event()
        self._watch = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for event in self._api.events(names.PODS, await self._api.version(names.PODS)):
            labels = event["object"]["metadata"].get("labels") or {}
            if event["type"] == "ADDED" and labels.get(names.LABEL_JOB_NAME) == self._run:
                self._missing -= 1
                if self._missing == 0:
                    self._seen.set()

    async def run_job(self, nodes: int) -> float:
        """POST a DDPJob."""
        name = next(self._names)
        return await self._measure(name, nodes, names.DDPJOBS, [json.dumps(job_of(name, nodes)).encode()])

    async def post_pods(self, nodes: int) -> float:
        """POST the pods that the operator would create, all at once."""
        name = next(self._names)
        return await self._measure(name, nodes, names.PODS, pods_of(name, nodes))

    async def _measure(self, name: str, nodes: int, resource: names.Resource, bodies: list[bytes]) -> float:
        api = self._api
        # Open connections, as a process that has run for a while has them open.
        await asyncio.gather(*(api.get(f"{api.server}/api/v1") for _ in bodies[:CONNECTIONS]))
        self._run, self._missing = name, nodes
        self._seen.clear()
        begin = time.perf_counter()
        await asyncio.gather(*(api.post(resource, body) for body in bodies))
        seen = asyncio.create_task(self._seen.wait())
        await asyncio.wait({seen, self._watch}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ms = 1000 * (time.perf_counter() - begin)
        if not seen.done():
            raise RuntimeError(f"{self._missing} of {nodes} pods are missing after {SECONDS:g} s")
        if resource is names.DDPJOBS:
            await api.delete(resource, f"/{name}")
        selector = f"labelSelector={names.LABEL_JOB_NAME}={name}"
        await api.delete(names.PODS, f"?{selector}&gracePeriodSeconds=0")
        for service in (await api.get(f"{api.url(names.SERVICES)}?{selector}"))["items"]:
            await api.delete(names.SERVICES, f"/{service['metadata']['name']}")
        gc.collect()
        await asyncio.sleep(SETTLE_SECONDS)
        return ms

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)


def pods_of(name: str, nodes: int) -> list[bytes]:
    """Return the encoded pods that the operator creates for that job, except for the label that it watches."""
    body = job_of(name, nodes)
    body["metadata"] |= {"namespace": NAMESPACE, "uid": str(uuid.uuid4()), "generation": 1}
    bodies = []
    for create in desired_pods(Job.of(body), 1, EngineSettings()):
        pod = copy.deepcopy(create.body)
        # Otherwise the operator would watch these pods too, and its work would slow the floor.
        labels = pod["metadata"]["labels"]
        labels[f"{names.GROUP}/run-uid"] = labels.pop(names.LABEL_JOB_UID)
        bodies.append(json.dumps(pod).encode())
    return bodies


async def measure(sizes: Sequence[int], repetitions: int) -> list[Size]:
    """Start the control plane and the operator, measure, and stop both.

    Python's garbage collector, which would add up to 50 ms to some measurements, runs between them only.
    """
    found = [Size(nodes) for nodes in sizes]
    with control_plane() as plane, OperatorProcess(plane, ""):
        async with ApiServer.reached_by(plane) as api:
            measured = Measured(api)
            await asyncio.wait_for(api.opened.wait(), SECONDS)
            gc.disable()
            for size in found:
                size.first = await measured.run_job(size.nodes)
                await measured.post_pods(size.nodes)
            for repetition in range(repetitions):
                for size in found:
                    # Alternate the order: the second may find the server warmer, or busy with deleting.
                    if repetition % 2:
                        size.operator.append(await measured.run_job(size.nodes))
                    size.floor.append(await measured.post_pods(size.nodes))
                    if not repetition % 2:
                        size.operator.append(await measured.run_job(size.nodes))
            gc.enable()
            await measured.close()
    return found


def main() -> int:
    """Measure and print. The exit code is 0 if the targets are met at every size, else 1."""
    parser = parser_of("tests.benchmarks.apply_to_pods", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    options = parser.parse_args()
    prepare.ensure("etcd", "kube-apiserver")
    machine = describe_machine()  # before the benchmark's own load
    found = asyncio.run(measure(options.sizes, options.repetitions))
    aim = f"aim: floor × {FACTOR:g} + {CONSTANT_MS:g} ms"
    heading = ("nodes", "floor: concurrent POSTs", "operator", aim, "slowest run", "first run")
    shown = table_of(heading, [size.cells() for size in found], names=0)
    foot = f"Medians of {options.repetitions} repetitions on {machine}."
    print_table(options, "apply-to-pods", f"{shown}\n\n{foot}")
    return 0 if all(size.holds for size in found) else 1


if __name__ == "__main__":
    sys.exit(main())
