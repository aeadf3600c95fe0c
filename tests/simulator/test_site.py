"""A job whose program trains by itself on nodes that fail: it is not lost, and no two attempts write at the same time.

``stories`` says what happens, and ``site_oracle`` what must hold.
"""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.faults import CRASHES, At
from tests.simulator.parallel import failures_of
from tests.simulator.runs import Run, compare
from tests.simulator.stories import SITE, STORIES
from tests.simulator.volume import Volume, Writer
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
    failures = failures_of(processes, runs)
    assert not failures, f"{len(failures)} runs failed, the first ones:\n" + "\n".join(failures[:3])


def test_random_stories_lose_no_job(processes: ProcessPoolExecutor) -> None:
    failures = failures_of(processes, [Run(SITE, seed=seed) for seed in range(RUNS)])
    assert not failures, f"{len(failures)} runs failed, the first ones:\n" + "\n".join(failures[:3])


def test_volume_shows_which_save_came_after_a_newer_attempt() -> None:
    volume = Volume()
    first, second, other = Writer("a", 1, "a-1"), Writer("a", 2, "a-2"), Writer("b", 1, "b-1")
    volume.save(1.0, first, 10, fenced=False)
    assert volume.load(2.0, second) == 10
    volume.save(3.0, first, 12, fenced=False)
    assert not volume.save(4.0, first, 14, fenced=True) and volume.step == 12
    assert list(volume.late_saves()) == [(volume.log[2], volume.log[1])]
    volume.load(5.0, other)
    assert volume.is_older(second) and not volume.is_older(other)
