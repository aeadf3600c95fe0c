"""A job whose program trains by itself on nodes that fail: it is not lost, and no two attempts write at the same time.

``stories`` says what happens, and ``site_oracle`` what must hold.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from ddpjob.api import names
from tests.simulator.faults import CRASHES, At
from tests.simulator.oracle import History
from tests.simulator.parallel import check_all
from tests.simulator.runs import Run, compare, execute
from tests.simulator.site import Site
from tests.simulator.site_oracle import check_site
from tests.simulator.stories import SITE, STORIES
from tests.simulator.volume import Volume, Writer
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


def test_oracle_finds_saves_that_no_fence_refused() -> None:
    changes, site = _lived("slow-end-with-a-fence")
    check_site(changes, site)
    for volume in site.volumes.values():
        volume.log = [access._replace(refused=False) for access in volume.log]
    with pytest.raises(AssertionError, match="after attempt 2 began"):
        check_site(changes, site)


def test_oracle_finds_a_lost_job_and_one_that_should_have_failed() -> None:
    changes, site = _lived("bug-at-a-step")
    with pytest.raises(AssertionError, match="the job life is lost"):
        check_site(changes, site)
    changes, site = _lived("trains-without-trouble")
    with pytest.raises(AssertionError, match="has an error, and the job is Succeeded"):
        check_site(changes, site, fails=True)


@pytest.mark.parametrize("taken", ["labels", "ownerReferences"])
def test_oracle_finds_pods_that_no_job_finds_again(taken: str) -> None:
    changes, site = _lived("trains-without-trouble")
    stripped = [
        (time, replace(change, obj=change.obj | {"metadata": change.obj["metadata"] | {taken: {}}}))
        for time, change in changes
        if change.resource is names.PODS
    ]
    with pytest.raises(AssertionError, match="was of no job for"):
        check_site(stripped, site)


def _lived(story: str) -> tuple[History, Site]:
    simulation = execute(Run(story)).simulation
    assert isinstance(simulation.kubelets, Site)
    return simulation.changes, simulation.kubelets
