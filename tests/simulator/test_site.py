"""A job whose program trains by itself on nodes that fail: it is not lost, and no two attempts write at the same time.

``stories`` says what happens, and ``site_oracle`` what must hold.
"""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.faults import CRASHES, At
from tests.simulator.parallel import check_all
from tests.simulator.runs import Run, compare
from tests.simulator.stories import SITE, STORIES
from tests.simulator.watches import MODES
from tests.soak import ALL

RUNS = 20
WRITES = range(1, 40, 1 if ALL else 13)


@pytest.mark.parametrize("story", STORIES)
def test_good_program_is_not_lost_and_no_attempts_write_beside_each_other(story: str) -> None:
    compare(Run(story))


def test_the_same_holds_when_the_operator_is_killed(processes: ProcessPoolExecutor) -> None:
    """It starts again at once, or after all waits have passed."""
    runs = [
        Run(story, (At(CRASHES[(place + write) % 2], write),), downtime=downtime)
        for place, story in enumerate(STORIES)
        for write in WRITES
        for downtime in (0, 20)
        if ALL or (place + write + downtime) % 9 == 0
    ]
    check_all(processes, runs)


def test_the_same_holds_with_late_watches_and_two_operators(processes: ProcessPoolExecutor) -> None:
    runs = [
        Run(story, watch=mode, operators=1 + (place + number) % 2)
        for place, story in enumerate(STORIES)
        for number, mode in enumerate(MODES)
        if ALL or (place + number) % 16 == 0
    ]
    check_all(processes, runs)


def test_random_stories_lose_no_job(processes: ProcessPoolExecutor) -> None:
    check_all(processes, [Run(SITE, seed=seed) for seed in range(RUNS)])
