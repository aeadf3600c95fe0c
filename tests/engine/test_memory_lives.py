"""A thousand lives of a job on the in-memory cluster: whatever happens, the controller keeps its promises.

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
"""A thousand lives take some 34 s of CPU on two cores; a test catches only what makes them many times dearer."""

SPEC = {"image": "trainer:1", "numNodes": 2, "restartPolicy": {"maxRestarts": 3}}
STORY = ("1", "vanish", "suspend", "succeed")


def test_a_thousand_lives_keep_every_promise() -> None:
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


def test_the_same_seed_is_the_same_life() -> None:
    for seed in (3, 4):
        assert live(seed).story() == live(seed).story()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_at_any_single_write_changes_nothing_in_the_end(trouble: str) -> None:
    undisturbed = live(1, fates=STORY, spec=SPEC)
    expected = undisturbed.outcome()
    writes = sum(call.is_write and call.resource.kind != "Event" for call in undisturbed.calls)
    assert writes > 15
    for number in range(1, writes + 1):
        troubled = live(1, at_write(number, trouble), STORY, SPEC)
        assert troubled.outcome() == expected, f"{trouble} at write {number}"
