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

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import floor
from tests.benchmarks.api_server import ApiServer, Timeline
from tests.benchmarks.floor import NAMESPACE, Aim, Result
from tests.benchmarks.operator_process import OperatorProcess
from tests.worlds.control_plane import control_plane

REPETITIONS = 9
AIM = Aim(1.5, 15)


@dataclass(frozen=True, kw_only=True)
class Row(floor.Row):
    """The medians for one size, in milliseconds."""

    slowest_ms: float
    """The slowest repetition of the operator."""
    stages_ms: dict[str, float]
    """The times of the status patch, the Service and the first pod, in the JSON only."""


async def measure(sizes: Sequence[int], repetitions: int) -> tuple[list[Row], dict[str, Any]]:
    """Start the control plane and the operator, measure, and stop both."""
    with control_plane() as plane, OperatorProcess(plane.kubeconfig()) as operator:
        operator.wait_until_ready()
        async with ApiServer.reached_by(plane, NAMESPACE) as api:
            rows, first = await measure_sizes(api, sizes, repetitions)
    return rows, {"first_run_ms": {str(nodes): round(ms, 1) for nodes, ms in first.items()}}


async def measure_sizes(api: ApiServer, sizes: Sequence[int], repetitions: int) -> tuple[list[Row], dict[int, float]]:
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
    lowest = statistics.median(floors)
    totals = [run.total_ms for run in runs]
    stages = {
        name: round(statistics.median(run.stages_ms[name] for run in runs), 1)
        for name in runs[0].stages_ms
        if all(name in run.stages_ms for run in runs)
    }
    return Row(
        nodes=nodes,
        floor_ms=round(lowest, 1),
        operator_ms=round(statistics.median(totals), 1),
        aim_ms=AIM.ms(lowest),
        slowest_ms=round(max(totals), 1),
        stages_ms=stages,
    )


def table(result: Result[Row]) -> str:
    """Return the result as a Markdown table."""
    rows, first = result.rows, result.more["first_run_ms"]
    more = {"slowest run": [row.slowest_ms for row in rows], "first run": [first[str(row.nodes)] for row in rows]}
    lines = floor.table_lines(result, AIM, "operator", more)
    return "\n".join([*lines, "", result.source()])


if __name__ == "__main__":
    sys.exit(floor.main("apply_to_pods", __doc__, REPETITIONS, measure, table))
