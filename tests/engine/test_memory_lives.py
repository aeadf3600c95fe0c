"""A thousand lifecycles of a job on the in-memory cluster: the controller's invariants hold under random faults.

``python -m tests.engine.memory_life SEED`` lives one of them again.
"""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.engine.memory_life import TROUBLES, at_write, live, live_many

LIVES = 1000
CORES = 2
CPU_SECONDS = 200.0
"""CPU time limit. A thousand lifecycles take about 34 s on two cores; the limit detects only large regressions."""

SPEC = {"image": "trainer:1", "numNodes": 2, "restartPolicy": {"maxRestarts": 3}}
FATES = ("1", "vanish", "suspend", "succeed")


def test_invariants_hold_in_a_thousand_job_lifecycles() -> None:
    workers = min(CORES, os.cpu_count() or 1)
    shares = [range(number, LIVES, 8 * workers) for number in range(8 * workers)]
    began = time.monotonic()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(live_many, shares))
    failures = [failure for failed, _, _ in results for failure in failed]
    cpu = sum({pid: seconds for _, pid, seconds in results}.values())
    print(f"\n{LIVES} lives in {time.monotonic() - began:.1f} s, {cpu:.1f} s of CPU on {workers} cores")
    assert not failures, "\n".join(failures[:3])
    assert cpu < CPU_SECONDS


def test_same_seed_gives_the_same_lifecycle() -> None:
    for seed in (3, 4):
        assert live(seed).writes() == live(seed).writes()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_fault_at_any_single_write_leads_to_the_same_end(trouble: str) -> None:
    undisturbed = live(1, fates=FATES, spec=SPEC)
    expected = undisturbed.outcome()
    writes = sum(call.is_write and call.resource.kind != "Event" for call in undisturbed.calls)
    assert writes > 15
    for number in range(1, writes + 1):
        troubled = live(1, at_write(number, trouble), FATES, SPEC)
        assert troubled.outcome() == expected, f"{trouble} at write {number}"
