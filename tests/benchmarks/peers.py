"""Measure the time from the POST of a job until all its pods exist, beside PyTorchJob on the same API server.

    python -m tests.benchmarks.peers            # table on standard output
    python -m tests.benchmarks.peers --write    # and into docs/develop/benchmarks.md

The floor is the time for the same pods, POSTed concurrently without an operator (``apply_to_pods``). Both operators run
beside each other with their defaults, and one is idle while the other is measured. Floor, DDPJob and PyTorchJob
alternate within each repetition, in another order each time. The result is the median.

The targets are floor × 1.3 + 8 ms, and less than PyTorchJob, at every size.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import floor, pytorchjob
from tests.benchmarks.api_server import ApiServer, Timeline
from tests.benchmarks.floor import NAMESPACE, Aim, Result
from tests.benchmarks.operator_process import OperatorProcess
from tests.worlds.control_plane import control_plane

REPETITIONS = 5
AIM = Aim(1.3, 8)


@dataclass(frozen=True, kw_only=True)
class Row(floor.Row):
    """The medians for one size, in milliseconds."""

    pytorchjob_ms: float

    @property
    def holds(self) -> bool:
        return super().holds and self.operator_ms < self.pytorchjob_ms


async def measure(sizes: Sequence[int], repetitions: int) -> tuple[list[Row], dict[str, Any]]:
    """Start the control plane and both operators, measure, and stop all."""
    pytorchjob.build()
    with (
        control_plane() as plane,
        OperatorProcess(plane.kubeconfig()) as operator,
        pytorchjob.PyTorchJobOperator(plane) as peer,
    ):
        operator.wait_until_ready()
        peer.wait_until_ready()
        async with ApiServer.reached_by(plane, NAMESPACE) as api:
            return [await measure_size(api, nodes, repetitions) for nodes in sizes], {}


async def measure_size(api: ApiServer, nodes: int, repetitions: int) -> Row:
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
        operator_ms=medians["ddpjob"],
        aim_ms=AIM.ms(medians["floor"]),
        pytorchjob_ms=medians["pytorchjob"],
    )


def table(result: Result[Row]) -> str:
    """Return the result as a Markdown table."""
    peer = {f"PyTorchJob {pytorchjob.VERSION}": [row.pytorchjob_ms for row in result.rows]}
    return "\n".join([*floor.table_lines(result, AIM, "DDPJob", peer), "", result.source()])


if __name__ == "__main__":
    sys.exit(floor.main("peers", __doc__, REPETITIONS, measure, table))
