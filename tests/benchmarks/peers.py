"""Measure the time from the POST of a job until all its pods exist, beside PyTorchJob on the same API server.

    python -m tests.benchmarks.peers            # table on standard output
    python -m tests.benchmarks.peers --write    # and into docs/benchmarks.md

The floor is the time for the same pods, POSTed concurrently without an operator (``apply_to_pods``). Both operators run
beside each other with their defaults, and one is idle while the other is measured. Floor, DDPJob and PyTorchJob
alternate within each repetition, in another order each time. The result is the median.

The targets are floor × 1.3 + 8 ms, and less than PyTorchJob, at every size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks import pytorchjob
from tests.benchmarks.api_server import ApiServer, Timeline
from tests.benchmarks.operator_process import OperatorProcess
from tests.benchmarks.report import describe_machine, write_section
from tests.controlplane import control_plane
from tests.kind import prepare

SIZES = (1, 8, 32, 64)
REPETITIONS = 5
NAMESPACE = "default"


@dataclass(frozen=True)
class Row:
    """The medians for one size, in milliseconds."""

    nodes: int
    floor_ms: float
    ddpjob_ms: float
    pytorchjob_ms: float
    aim_ms: float

    @property
    def holds(self) -> bool:
        return self.ddpjob_ms <= self.aim_ms and self.ddpjob_ms < self.pytorchjob_ms


async def measure(api: ApiServer, nodes: int, repetitions: int) -> Row:
    """Return the medians for one size; the first round is not counted, because it warms code and connections."""
    subjects: dict[str, Callable[[], Awaitable[Timeline]]] = {
        "floor": lambda: api.post_pods(nodes),
        "ddpjob": lambda: api.run_job(nodes),
        "pytorchjob": lambda: api.run_job(nodes, pytorchjob.PYTORCHJOB),
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for repetition in range(repetitions + 1):
        for name in order:
            timeline = await subjects[name]()
            if repetition:
                times[name].append(timeline.total_ms)
        order = [*order[1:], order[0]]
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return Row(
        nodes=nodes,
        floor_ms=medians["floor"],
        ddpjob_ms=medians["ddpjob"],
        pytorchjob_ms=medians["pytorchjob"],
        aim_ms=round(1.3 * medians["floor"] + 8, 1),
    )


async def run(sizes: tuple[int, ...], repetitions: int) -> dict[str, Any]:
    """Start the control plane and both operators, measure, stop all, and return the result."""
    machine = describe_machine()  # before the benchmark's own load
    with (
        control_plane() as plane,
        OperatorProcess(plane.kubeconfig()) as operator,
        pytorchjob.PyTorchJobOperator(plane) as peer,
    ):
        operator.wait_until_ready()
        peer.wait_until_ready()
        async with ApiServer.reached_by(plane, NAMESPACE) as api:
            rows = [await measure(api, nodes, repetitions) for nodes in sizes]
    return {
        "benchmark": "peers",
        "machine": machine,
        "repetitions": repetitions,
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    lines = [
        f"| nodes | floor: concurrent POSTs | DDPJob | PyTorchJob {pytorchjob.VERSION} | aim: floor × 1.3 + 8 ms |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['nodes']} | {r['floor_ms']:,.1f} ms | **{r['ddpjob_ms']:,.1f} ms** | {r['pytorchjob_ms']:,.1f} ms | "
        f"{r['aim_ms']:,.1f} ms ({'held' if r['ddpjob_ms'] <= r['aim_ms'] else 'missed'}) |"
        for r in result["rows"]
    ]
    return "\n".join([*lines, "", f"Medians of {result['repetitions']} repetitions on {result['machine']}."])


def main() -> int:
    """Measure and print. The exit code is 0 if both targets are met at every size, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    prepare.ensure("etcd", "kube-apiserver")
    pytorchjob.build()
    result = asyncio.run(run(tuple(options.sizes), options.repetitions))
    print(json.dumps(result, indent=2) if options.json else table(result))
    if options.write:
        write_section("peers", table(result))
    return 0 if all(row["holds"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
