"""Each scenario ends in the same way whatever fails, whenever the operator is killed, and however late it sees changes.

These are samples in which each write meets a crash; `make soak` carries out all combinations.
A failure names the command that replays it.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.faults import CRASHES, ERRORS, KINDS, At
from tests.simulator.parallel import check_all
from tests.simulator.runs import Run, execute, undisturbed
from tests.simulator.scenarios import SCENARIOS
from tests.simulator.watches import MODES
from tests.soak import ALL

ORDERS = 4
TOGETHER = ("prompt", "late", "shuffled")
WITH_LOGS = "rank-failure-without-report"
TWICE = ("rank-failure", "suspension", "node-loss")
_NAMES = re.compile(r"[0-9a-f]{16}|-[0-9a-f]{5}\b")  # the generated parts of names
MORE_WRITES = 4
"""A restarted operator repeats some writes, so the last one has a higher number than without a crash."""


@pytest.mark.parametrize("kind", KINDS)
def test_fault_at_any_write_leads_to_the_same_end(kind: str, processes: ProcessPoolExecutor) -> None:
    check_all(processes, [Run(name, (At(kind, write),)) for name, write in _writes_that_get(kind)])


def _writes_that_get(kind: str) -> Iterator[tuple[str, int]]:
    """Yield scenarios and numbers of writes that get this fault: a crash before or after each write in turn.

    The scenarios share most of their writes, so a write between the same two writes gets each fault in one only.
    """
    done: set[tuple[str, ...]] = set()
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        writes = [_NAMES.sub("#", write) for write in undisturbed(name).writes]
        for write in range(1, len(writes) + 1):
            if not ALL and kind not in _in_turn(number, write, is_variant=scenario.is_variant):
                continue
            between = tuple(writes[max(0, write - 2) : write + 1])
            if ALL or between not in done:
                done.add(between)
                yield name, write


def _in_turn(scenario: int, write: int, *, is_variant: bool) -> tuple[str, ...]:
    if is_variant:
        return (KINDS[write % len(KINDS)],)
    return (CRASHES[(scenario + write) % len(CRASHES)], ERRORS[(scenario + write) % len(ERRORS)])


@pytest.mark.parametrize("scenario", TWICE)
def test_two_crashes_at_any_writes_lead_to_the_same_end(scenario: str, processes: ProcessPoolExecutor) -> None:
    last = len(undisturbed(scenario).writes) + MORE_WRITES
    pairs = [
        (first, second)
        for second in range(2, last)
        for first in range(1, second)
        if ALL or (first + 2 * second) % (3 * len(TWICE)) == TWICE.index(scenario)
    ]
    runs = [
        Run(scenario, (At(CRASHES[first % 2], first), At(CRASHES[(first + second) % 2], second)))
        for first, second in pairs
    ]
    check_all(processes, runs)


def test_kill_of_the_operator_that_reads_logs_loses_no_cause(processes: ProcessPoolExecutor) -> None:
    """It starts again at once, or after all waits have passed."""
    runs = [
        Run(WITH_LOGS, (At(kind, write),), logs=1, downtime=downtime)
        for write in range(1, len(undisturbed(WITH_LOGS).writes) + 1)
        for place, kind in enumerate(CRASHES)
        for downtime in (0, 20)
        if ALL or downtime or write % len(CRASHES) == place
    ]
    check_all(processes, runs)


def test_late_watches_and_any_order_of_reports_lead_to_the_same_end(processes: ProcessPoolExecutor) -> None:
    runs = [
        Run(scenario, watch=mode, order=order)
        for number, scenario in enumerate(SCENARIOS)
        for place, mode in enumerate(MODES)
        for order in range(ORDERS)
        if ALL or (number + place) % (4 * ORDERS) == 4 * order
    ]
    runs += [Run(WITH_LOGS, watch=mode, order=place, logs=1) for place, mode in enumerate(MODES)]
    check_all(processes, runs)


def test_two_operators_at_once_lead_to_the_same_end(processes: ProcessPoolExecutor) -> None:
    runs = [
        Run(scenario, watch=mode, order=order, operators=2)
        for number, scenario in enumerate(SCENARIOS)
        for order, mode in enumerate(TOGETHER)
        if ALL or order == number % len(TOGETHER)
    ]
    runs += [Run(WITH_LOGS, watch=mode, logs=1, operators=2) for mode in TOGETHER]
    check_all(processes, runs)


def test_same_run_has_the_same_writes() -> None:
    for run in (Run("node-loss", (At("lost", 7),)), Run("random", seed=3)):
        assert execute(run).writes == execute(run).writes
