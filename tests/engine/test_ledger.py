"""The ledger of a job's time: which category each second is in, whatever the operator saw, missed or wrote twice."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.status import recorded_status
from ddpjob.api.time_spent import TimeSpent
from ddpjob.api.times import parse_time, timestamp
from ddpjob.engine.actions import Problem
from tests.builders import NOW, World, a_job, ended, failed, is_idle


def new_world(**spec: Any) -> World:
    """Return a world with a job that was created now."""
    world = World(a_job(**spec))
    world.job["metadata"]["creationTimestamp"] = timestamp(NOW)
    return world


def a_training_world(**spec: Any) -> World:
    """Return a world whose job waited 5 s, was scheduled in 30 s, started in 20 s, and has made step 1 of 100."""
    world = new_world(**spec)
    world.later(5)
    world.forward(30)
    world.run_all_and_settle()
    report(world, step=0)
    world.settle()
    world.forward(20)
    report(world, step=1)
    world.settle()
    return world


def set_report(world: World, **progress: Any) -> None:
    world.progress = {"totalSteps": 100} | progress, world.pod(0)["metadata"]["name"]


def report(world: World, *, after: float = 0, **progress: Any) -> None:
    """Settle after so many seconds with a report of rank 0."""
    world.forward(after)
    set_report(world, **progress)
    world.settle()


def spent(world: World) -> dict[str, int]:
    """Return the seconds of the categories that have some, and check their sum."""
    ledger = recorded_status(world.status).time
    assert ledger is not None
    since = parse_time(world.job["metadata"]["creationTimestamp"])
    assert ledger.total == int((parse_time(ledger.as_of) - since).total_seconds())
    assert all(seconds >= 0 for seconds in ledger.by_category.values())
    return {name: seconds for name, seconds in ledger.by_category.items() if seconds}


def current(world: World) -> str | None:
    ledger = recorded_status(world.status).time
    return ledger.current if ledger else None


def restart(world: World, *, seconds: int, resumed: int, step: int, **more: float) -> None:
    """Let the pods of the next attempt run, and rank 0 report a step after that time."""
    world.settle()
    world.run_all_and_settle()
    world.forward(seconds)
    place = {"step": resumed, "path": f"{resumed}.pt"} if resumed else None
    report(world, step=step, resumedFrom=place, checkpoint=place, stepsPerSecond=1000.0, **more)


def test_a_training_is_queued_scheduled_started_and_trained() -> None:
    world = a_training_world()
    assert spent(world) == {"queued": 5, "scheduling": 30, "starting": 20} and current(world) == "training"
    world.forward(45)
    world.show_all(ended(0, at=world.now))
    assert spent(world) == {"queued": 5, "scheduling": 30, "starting": 20, "training": 45}
    assert current(world) is None and world.status["time"]["asOf"] == world.status["completionTime"]


def test_a_job_without_events_is_not_written_for_its_time() -> None:
    world = a_training_world()
    for _ in range(5):
        world.forward(3600)
        assert is_idle(world.reconcile())
    report(world, step=2)
    assert spent(world)["training"] == 5 * 3600


def test_the_value_between_two_writes_follows_from_the_recorded_one() -> None:
    world = a_training_world()
    ledger = recorded_status(world.status).time
    assert ledger is not None
    later = ledger.at(world.now + timedelta(seconds=90))
    assert (later.training, later.total) == (90, ledger.total + 90)
    assert ledger.at(world.now - timedelta(seconds=90)) == ledger
    assert ledger.at(world.now).goodput == 0 and later.goodput == pytest.approx(90 / (30 + 20 + 90))


def test_goodput_does_not_count_the_queue_and_suspensions() -> None:
    ledger = TimeSpent(as_of=timestamp(NOW), queued=1000, stopped=5000, training=60, saving=10, recovering=30)
    assert ledger.goodput == pytest.approx(0.6)
    assert TimeSpent(as_of=timestamp(NOW), queued=1000).goodput is None


def test_steps_that_are_trained_again_are_lost_and_all_until_then_is_recovery() -> None:
    world = a_training_world()
    report(world, step=51, after=100)
    world.set_pod(0, failed(1))
    world.later(7)
    before = spent(world)
    restart(world, seconds=13, resumed=31, step=32)
    assert spent(world) == before | {"recovering": 13} and before["training"] == 107
    assert current(world) == "lost"
    report(world, step=41, resumedFrom={"step": 31, "path": "31.pt"}, after=10)
    assert spent(world)["lost"] == 10 and current(world) == "lost"
    report(world, step=51, resumedFrom={"step": 31, "path": "31.pt"}, after=10)
    assert spent(world)["lost"] == 20 and current(world) == "training"
    report(world, step=61, resumedFrom={"step": 31, "path": "31.pt"}, after=10)
    assert (spent(world)["lost"], spent(world)["training"]) == (20, before["training"] + 10)


def test_steps_of_a_script_that_reports_nothing_else_begin_at_zero_in_each_attempt() -> None:
    world = new_world()
    world.settle()
    world.run_all_and_settle()
    for step in (0, 1, 50):
        world.forward(10)
        world.report({"step": step})
    world.fail(0)
    world.run_all_and_settle()
    for step in (1, 30):
        world.forward(10)
        world.report({"step": step})
    assert spent(world) == {"starting": 20, "training": 20, "recovering": 10}, "nobody knows what was trained again"


def test_a_script_that_does_not_say_from_where_it_resumed_continues_from_its_checkpoint() -> None:
    world = a_training_world()
    for step in (21, 41):
        report(world, step=step, checkpoint={"path": "a.pt", "step": 21}, after=20)
    world.fail(0)
    world.forward(5)
    world.run_all_and_settle()
    world.forward(30)
    world.report({"step": 31, "stepsPerSecond": 1.0})
    assert (spent(world)["recovering"], current(world)) == (35, "lost")
    world.forward(10)
    world.report({"step": 41, "stepsPerSecond": 1.0})
    assert (spent(world)["lost"], spent(world)["training"], current(world)) == (10, 40, "training")


def test_first_step_of_a_restarted_program_is_seen_if_it_does_not_say_from_where_it_resumed() -> None:
    """Its steps may be of the attempt or of the training, so their number does not tell when it began."""
    world = a_training_world()
    report(world, step=50)
    world.fail(0)
    world.run_all_and_settle()
    report(world, step=51, stepsPerSecond=2.0, after=30)
    assert spent(world)["recovering"] == 30 and current(world) == "training"


def test_a_program_without_reports_trains_as_soon_as_all_its_pods_run() -> None:
    world = new_world()
    world.settle()
    world.forward(3)
    world.run_all_and_settle()
    world.forward(600)
    world.fail(0, 1, at=world.now)
    world.forward(8)
    world.run_all_and_settle()
    assert spent(world) == {"scheduling": 3, "training": 600, "recovering": 8} and current(world) == "training"


def pause(world: World, step: int, seconds: float, **more: Any) -> None:
    """Let the launcher report a pause that has lasted so long; a step takes 2 s."""
    report(world, step=step, ageSeconds=seconds, pause={"stepSeconds": 2.0}, **more, after=seconds)


def test_a_pause_beyond_a_few_steps_is_stalled_until_a_step_is_seen() -> None:
    world = a_training_world()
    report(world, step=51, ageSeconds=0.0, after=100)
    pause(world, 51, 24)
    assert (spent(world)["training"], spent(world)["stalled"], current(world)) == (106, 18, "stalled")
    world.forward(3600)
    assert is_idle(world.reconcile())
    ledger = recorded_status(world.status).time
    assert ledger is not None and ledger.at(world.now).goodput == pytest.approx(106 / (50 + 106 + 3618))
    report(world, step=54)
    trained = (spent(world)["training"], spent(world)["stalled"], current(world))
    assert trained == (106, 3618, "training")
    report(world, step=59, after=10)
    assert (spent(world)["training"], spent(world)["stalled"]) == (116, 3618)


def test_a_pause_that_began_before_the_last_write_is_stalled_from_its_begin() -> None:
    world = a_training_world()
    report(world, step=51, ageSeconds=8.0, after=100)
    report(world, step=51, ageSeconds=18.0, pause={"stepSeconds": 0.5}, after=10)
    assert (spent(world)["training"], spent(world)["stalled"]) == (94, 16)


@pytest.mark.parametrize("seconds", [1e-300, 1e308, 1e300, float("nan")])
def test_a_pause_with_a_step_of_no_possible_time_is_counted(seconds: float) -> None:
    world = a_training_world()
    report(world, step=51, ageSeconds=24.0, pause={"stepSeconds": seconds})
    shown = recorded_status(world.status).pause
    assert shown is not None and len(shown.text(world.now)) < 100
    report(world, step=2**53, after=100)
    assert recorded_status(world.status).pause is None and current(world) == "training"


def test_saves_are_taken_out_of_the_training_once() -> None:
    world = a_training_world()
    for seconds, step, saved in ((50, 10, 4.6), (50, 20, 4.6), (2, 21, 9.2)):
        report(world, step=step, savingSeconds=saved, after=seconds)
    assert (spent(world)["saving"], spent(world)["training"]) == (9, 93), "5 s of 2: the rest was counted as training"
    report(world, step=22, savingSeconds=1e7, after=10)
    assert spent(world)["saving"] == 9 + 93 + 10 and "training" not in spent(world), "no report can make it negative"


def test_an_older_report_does_not_make_saves_count_twice() -> None:
    world = a_training_world()
    for step, saved in ((10, 20.0), (11, 5.0), (12, None), (13, 20.0)):
        report(world, step=step, **({} if saved is None else {"savingSeconds": saved}), after=50)
    assert (spent(world)["saving"], spent(world)["training"]) == (20, 180)


def test_a_restart_in_place_is_recovery_for_as_long_as_the_launchers_measured() -> None:
    world = a_training_world()
    report(world, step=50)
    life = {"life": 1, "node": 1, "kind": "Killed", "message": "killed", "progressed": True}
    report(world, step=50, life=2, lives=[life], after=10)
    assert spent(world)["training"] == 10, "until the next step it is not known how long it takes"
    world.forward(20)
    recovered = life | {"recoveryMilliseconds": 14_200}
    report(world, step=45, life=2, lives=[recovered], resumedFrom={"step": 40, "path": "40.pt"})
    assert (spent(world)["recovering"], spent(world)["training"], current(world)) == (14, 16, "lost")
    report(world, step=61, life=2, lives=[recovered], resumedFrom={"step": 40, "path": "40.pt"}, after=10)
    assert (spent(world)["recovering"], spent(world)["lost"]) == (14, 10), "each recovery once"


def test_a_job_that_is_created_suspended_is_stopped() -> None:
    world = new_world(suspend=True)
    world.later(100)
    world.forward(100)
    world.suspend(False)
    assert spent(world) == {"stopped": 200} and current(world) == "scheduling"


def test_a_job_whose_pods_are_refused_is_queued() -> None:
    world = new_world()
    world.reconcile(crash_after=1)
    world.problems = (Problem("CreateRefused", names.PODS, "mnist-0a1b2-1-0", "exceeded quota: pods=1"),)
    world.reconcile()
    world.problems = ()
    assert current(world) == "queued"
    world.later(40)
    assert spent(world) == {"queued": 40} and current(world) == "scheduling"


def test_an_operator_that_was_away_divides_the_time_by_the_times_of_the_pods() -> None:
    """It created the pods, was killed, and comes back when the training has failed."""
    world = new_world()
    world.reconcile()
    world.round = None
    began, failed_at = world.now + timedelta(seconds=40), world.now + timedelta(seconds=640)
    progress = {"step": 500, "stepsPerSecond": 1.0, "totalSteps": 900}
    for rank in range(2):
        status = failed(1, at=failed_at, progress=progress)
        status["containerStatuses"][0]["state"]["terminated"]["startedAt"] = timestamp(began)
        world.set_pod(rank, status)
    world.forward(3640)
    world.reconcile()
    world.reconcile()
    assert spent(world) == {"scheduling": 40, "starting": 100, "training": 500, "recovering": 3000}


@pytest.mark.parametrize("skew", [-100_000, -300, 0, 300, 100_000])
def test_a_clock_of_a_node_that_is_wrong_changes_no_sum_and_no_training_that_was_seen(skew: int) -> None:
    world = a_training_world()
    began = world.now + timedelta(seconds=skew)
    world.round = None
    for rank in range(2):
        status = ended(1, at=began + timedelta(seconds=220), started=began)
        world.set_pod(rank, status)
    world.later(1000)
    # The pods ran for 220 s, 20 of them before the first step.
    assert (spent(world)["training"], spent(world)["recovering"]) == (200, 800)


def test_the_wait_for_the_operator_after_the_end_is_no_training() -> None:
    world = a_training_world()
    began = world.now - timedelta(seconds=20)
    for rank in range(2):
        world.set_pod(rank, ended(0, at=world.now + timedelta(seconds=100), started=began))
    world.later(1000)
    assert (spent(world)["training"], spent(world)["stopped"]) == (100, 900)


def test_a_clock_that_was_set_back_adds_nothing_until_it_has_caught_up() -> None:
    world = a_training_world()
    before = spent(world)
    report(world, step=2, after=-3000)
    assert spent(world) == before
    report(world, step=3, after=3010)
    assert spent(world) == before | {"training": 10}


def test_a_patch_that_is_made_again_counts_nothing_twice() -> None:
    """A conflict, or a second operator with the same cache: each computes from what is recorded."""
    world = a_training_world()
    world.forward(30)
    set_report(world, step=5)
    recorded = copy.deepcopy(world.job)
    for _ in range(3):
        world.job = copy.deepcopy(recorded)
        world.reconcile()
    assert spent(world)["training"] == 30
