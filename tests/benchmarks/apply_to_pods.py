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
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.benchmarks.api_server import ApiServer
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.controller.operator_process import OperatorProcess
from tests.controlplane import control_plane
from tests.kind import prepare

NAMESPACE = "default"
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


async def measure(sizes: Sequence[int], repetitions: int) -> list[Size]:
    """Start the control plane and the operator, measure, and stop both."""
    found = [Size(nodes) for nodes in sizes]
    with control_plane() as plane, OperatorProcess(plane, ""):
        async with ApiServer.reached_by(plane, NAMESPACE) as api:
            for size in found:
                size.first = await api.run_job(size.nodes)
                await api.post_pods(size.nodes)
            for repetition in range(repetitions):
                for size in found:
                    # Alternate the order: the second may find the server warmer, or busy with deleting.
                    if repetition % 2:
                        size.operator.append(await api.run_job(size.nodes))
                    size.floor.append(await api.post_pods(size.nodes))
                    if not repetition % 2:
                        size.operator.append(await api.run_job(size.nodes))
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
