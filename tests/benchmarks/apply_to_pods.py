"""Measure the time from the POST of a job until all its pods exist, and the least time that the API server needs.

    python -m tests.benchmarks.apply_to_pods            # table on standard output
    python -m tests.benchmarks.apply_to_pods --write    # and into docs/benchmarks.md

kube-apiserver, etcd and the operator run as separate processes. The floor is the time for the same pods, POSTed
concurrently without an operator by one HTTP client with open connections and encoded bodies. One watch, opened before,
records the pods of both. Floor and operator alternate within each repetition, so that a busy machine slows both. The
result is the median.

The target is floor × 1.5 + 15 ms at every size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.benchmarks.api_server import ApiServer, Timeline
from tests.benchmarks.operator_process import OperatorProcess
from tests.benchmarks.report import describe_machine, write_section
from tests.controlplane import control_plane
from tests.kind import prepare

SIZES = (1, 8, 32, 64)
REPETITIONS = 9
NAMESPACE = "default"


@dataclass(frozen=True)
class Row:
    """The medians for one size, in milliseconds."""

    nodes: int
    floor_ms: float
    operator_ms: float
    aim_ms: float
    slowest_ms: float
    """The slowest repetition of the operator."""
    stages_ms: dict[str, float]
    """The times of the status patch, the Service and the first pod."""

    @property
    def holds(self) -> bool:
        return self.operator_ms <= self.aim_ms


async def measure(api: ApiServer, sizes: Sequence[int], repetitions: int) -> tuple[list[Row], dict[int, float]]:
    """Return the rows, and for each size the time of the first run (ms), without warm code and connections."""
    first: dict[int, float] = {}
    floors: dict[int, list[float]] = {n: [] for n in sizes}
    runs: dict[int, list[Timeline]] = {n: [] for n in sizes}
    for nodes in sizes:
        first[nodes] = (await api.run_job(nodes)).total_ms
        await api.post_pods(nodes)
    for repetition in range(repetitions):
        for nodes in sizes:
            # Alternate the order: the second may find the server warmer, or busy with deleting.
            if repetition % 2:
                runs[nodes].append(await api.run_job(nodes))
            floors[nodes].append((await api.post_pods(nodes)).total_ms)
            if not repetition % 2:
                runs[nodes].append(await api.run_job(nodes))
    return [_row(nodes, floors[nodes], runs[nodes]) for nodes in sizes], first


def _row(nodes: int, floors: list[float], runs: list[Timeline]) -> Row:
    floor = statistics.median(floors)
    totals = [run.total_ms for run in runs]
    stages = {
        name: round(statistics.median(run.stages_ms[name] for run in runs), 1)
        for name in runs[0].stages_ms
        if all(name in run.stages_ms for run in runs)
    }
    return Row(
        nodes=nodes,
        floor_ms=round(floor, 1),
        operator_ms=round(statistics.median(totals), 1),
        aim_ms=round(1.5 * floor + 15, 1),
        slowest_ms=round(max(totals), 1),
        stages_ms=stages,
    )


async def run(sizes: tuple[int, ...], repetitions: int) -> dict[str, object]:
    """Start the control plane and the operator, measure, stop both, and return the result."""
    machine = describe_machine()  # before the benchmark's own load
    with control_plane() as plane, OperatorProcess(plane.kubeconfig()) as operator:
        operator.wait_until_ready()
        async with ApiServer.reached_by(plane, NAMESPACE) as api:
            rows, first = await measure(api, sizes, repetitions)
    return {
        "benchmark": "apply_to_pods",
        "machine": machine,
        "repetitions": repetitions,
        "rows": [asdict(row) | {"holds": row.holds} for row in rows],
        "first_run_ms": {str(n): round(ms, 1) for n, ms in first.items()},
    }


def table(result: dict[str, object]) -> str:
    """Return the result as a Markdown table."""
    rows = result["rows"]
    first = result["first_run_ms"]
    assert isinstance(rows, list) and isinstance(first, dict)
    lines = [
        "| nodes | floor: concurrent POSTs | operator | aim: floor × 1.5 + 15 ms | slowest run | first run |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['nodes']} | {r['floor_ms']:.1f} ms | **{r['operator_ms']:.1f} ms** | {r['aim_ms']:.1f} ms "
        f"({'held' if r['holds'] else 'missed'}) | {r['slowest_ms']:.1f} ms | {first[str(r['nodes'])]:.1f} ms |"
        for r in rows
    ]
    lines += ["", "Where the time goes (medians, ms after the job's POST was sent):", ""]
    stages = list(rows[0]["stages_ms"])
    lines += [f"| nodes | {' | '.join(stages)} |", "|---:|" + "---:|" * len(stages)]
    lines += [f"| {r['nodes']} | {' | '.join(str(r['stages_ms'].get(s, '')) for s in stages)} |" for r in rows]
    lines += ["", f"Medians of {result['repetitions']} repetitions on {result['machine']}."]
    return "\n".join(lines)


def main() -> int:
    """Measure and print. The exit code is 0 if the target is met at every size, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.apply_to_pods", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    prepare.ensure("etcd", "kube-apiserver")
    result = asyncio.run(run(tuple(options.sizes), options.repetitions))
    print(json.dumps(result, indent=2) if options.json else table(result))
    if options.write:
        write_section("apply-to-pods", table(result))
    rows = result["rows"]
    assert isinstance(rows, list)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
