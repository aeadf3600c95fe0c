"""Restarts in place: the grant of an attempt, what the launchers report of them, and what both change in the status."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.report import training_report
from ddpjob.api.restarts import RestartPolicy
from ddpjob.api.status import InPlace, LifeFailure
from ddpjob.engine.inplace import KEPT_LIVES, fold, grant
from ddpjob.engine.obstacles import NO_PROGRESS
from tests.builders import World, a_job, a_running_world, ended, failed

ENDED = {"node": 1, "rank": 2, "kind": "Killed", "message": "rank 2 was killed by SIGKILL"}


def report(life: int, *, progressed: bool = True, **more: Any) -> dict[str, Any]:
    lives = [ENDED | {"life": number, "progressed": progressed} for number in range(max(1, life - 5), life)]
    return {"schema": 3, "step": 7, "phase": "train", "life": life, "lives": lives} | more


def of_lives(life: int, progressed: bool) -> InPlace:
    failure = LifeFailure(life=1, reason="Killed", message="", progressed=progressed)
    return InPlace(granted=9, life=life, failures=[failure] if life > 1 else None)


@pytest.mark.parametrize(
    ("before", "restarts", "granted"),
    [
        (None, 0, 100),
        (None, 30, 70),
        (None, 200, 0),
        (of_lives(1, progressed=False), 1, 99),
        (of_lives(3, progressed=True), 1, 99),
        (of_lives(3, progressed=False), 1, 0),
    ],
)
def test_grant_is_what_is_left_unless_restarts_in_place_made_no_progress(
    before: InPlace | None, restarts: int, granted: int
) -> None:
    assert grant(before, restarts, RestartPolicy()) == granted


def test_nothing_is_granted_where_a_failure_may_have_to_end_the_job() -> None:
    rule = {"onExitCodes": {"operator": "In", "values": [3]}, "action": "Fail"}
    for policy in ({"maxRestarts": 0}, {"rules": [rule]}):
        assert grant(None, 0, RestartPolicy.model_validate(policy)) == 0
    assert grant(None, 0, RestartPolicy.model_validate({"rules": [rule | {"action": "Restart"}]})) == 100


def test_reports_in_any_order_give_the_same_status() -> None:
    reports = [training_report(report(life)) for life in range(1, 5)]
    last = None
    for seed in range(20):
        seen = [*reports, *reports]
        random.Random(seed).shuffle(seen)
        in_place = InPlace(granted=9)
        for one in seen:
            after = fold(in_place, one)
            assert (after.life or 1) >= (in_place.life or 1)
            in_place = after
        assert last in (None, in_place)
        last = in_place
    assert last is not None and last.life == 4
    assert [failure.life for failure in last.failures or ()] == [1, 2, 3]


def test_life_that_was_not_granted_is_not_counted() -> None:
    in_place = fold(InPlace(granted=2), training_report(report(10**9)))
    assert in_place.life == 3


def test_time_of_a_restart_is_added_when_it_is_known_and_stays() -> None:
    timed = report(3)
    timed["lives"] = [life | {"recoveryMilliseconds": 640} for life in timed["lives"]]
    in_place = fold(
        fold(fold(InPlace(granted=9), training_report(report(2))), training_report(timed)), training_report(report(3))
    )
    assert [failure.recovery_milliseconds for failure in in_place.failures or ()] == [640, 640]


def test_last_lives_are_kept() -> None:
    in_place = fold(fold(InPlace(granted=20), training_report(report(4))), training_report(report(12)))
    assert [failure.life for failure in in_place.failures or ()] == list(range(12 - KEPT_LIVES, 12))


@pytest.mark.parametrize("lives", [None, "x", [1], [{"life": 0}], [{"life": True}], {"life": 1}])
def test_report_of_another_form_changes_nothing(lives: Any) -> None:
    in_place = InPlace(granted=2, life=1)
    assert fold(in_place, training_report({"lives": lives})) is in_place


def granted_in_pods(world: World) -> set[str]:
    attempt = str(world.status["attempt"])
    pods = [p for p in world.pods.values() if p["metadata"]["labels"][names.LABEL_ATTEMPT] == attempt]
    env = [{v["name"]: v["value"] for v in pod["spec"]["containers"][0]["env"]} for pod in pods]
    return {values[names.ENV_INPLACE_RESTARTS] for values in env}


def a_world(**spec: Any) -> World:
    return a_running_world(a_job(restartPolicy={"maxTotalRestarts": 10}, **spec))


def test_pods_created_after_a_crash_get_the_recorded_grant() -> None:
    world = World(a_job(restartPolicy={"maxTotalRestarts": 10}))
    world.reconcile(crash_after=1)  # the status is written
    world.settle()
    assert granted_in_pods(world) == {"10"}


def test_restarts_in_place_are_counted_shown_and_leave_the_attempt_alone() -> None:
    world = a_world()
    pods = dict(world.pods)
    world.progress = report(3), world.pod(0)["metadata"]["name"]
    made = world.reconcile()
    assert world.status["restarts"] == world.status["restartsInPlace"] == 2
    assert world.status["restartsCountedTowardsLimit"] == 0
    assert world.status["currentAttempt"]["inPlace"]["life"] == 3
    assert [note.reason for note in made.events].count("RestartedInPlace") == 2
    assert "life 3" in made.events[-1].message and "SIGKILL" in made.events[-1].message
    assert world.pods == pods
    world.settle()
    assert world.status["restarts"] == 2


@pytest.mark.parametrize(("progressed", "granted"), [(True, "7"), (False, "0")])
def test_attempt_that_follows_has_what_is_left(*, progressed: bool, granted: str) -> None:
    world = a_world()
    lives = report(3, progressed=progressed)
    world.set_pod(1, failed(1, exception="ValueError", message="m"))
    world.set_pod(0, failed(77, cause="peer", life=lives["life"], lives=lives["lives"]))
    world.settle_after_backoff()
    assert world.status["attempt"] == 2
    assert (world.status["restarts"], world.status["restartsInPlace"]) == (3, 2)
    assert world.status["restartsCountedTowardsLimit"] == 1
    assert granted_in_pods(world) == {granted}


def test_restarts_in_place_use_up_the_total_of_restarts() -> None:
    world = a_running_world(a_job(restartPolicy={"maxTotalRestarts": 2}))
    world.progress = report(3), world.pod(0)["metadata"]["name"]
    world.reconcile()
    world.set_pod(1, failed(1, exception="ValueError", message="m"))
    world.settle_after_backoff()
    assert world.status["state"] == "Failed"


def _restart_in_place(world: World, life: int, **training: Any) -> list[str]:
    """Reconcile with this life, and return the reasons of the events."""
    world.progress = report(life, **training), world.pod(0)["metadata"]["name"]
    return [note.reason for note in world.reconcile().events]


def _saved(step: int) -> dict[str, Any]:
    return {"step": step + 5, "checkpoint": {"step": step, "path": f"{step}.pt"}}


def test_job_that_restarts_without_a_later_checkpoint_is_said_to_do_so() -> None:
    world = a_world()
    _restart_in_place(world, 1, **_saved(40))
    assert world.status["furthest"] == {"checkpointStep": 40}
    for life in (2, 3):
        assert NO_PROGRESS not in _restart_in_place(world, life, **_saved(20 if life == 2 else 40))
    assert NO_PROGRESS in _restart_in_place(world, 4, **_saved(40))
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", NO_PROGRESS)
    assert "3 restarts and no checkpoint after step 40" in running["message"]
    assert NO_PROGRESS not in _restart_in_place(world, 5, **_saved(40))
    _restart_in_place(world, 5, **_saved(60))
    assert world.status["furthest"] == {"checkpointStep": 60}
    assert world.condition("Running")["reason"] == "AllNodesRunning"


def test_new_pods_without_progress_are_counted_like_restarts_in_place() -> None:
    world = a_world()
    for number in range(3):
        world.progress = {"step": 9 - number, "totalSteps": 90}, world.pod(0)["metadata"]["name"]
        world.reconcile()
        world.set_pod(1, ended(137) if number % 2 else failed(1, exception="ValueError", message="m"))
        world.run_next_attempt()
    assert world.status["furthest"] == {"step": 9, "restartsSince": 3}
    assert [note.reason for made in world.plans for note in made.events].count(NO_PROGRESS) == 1
    assert "no step after 9" in world.condition("Running")["message"]


def test_steps_of_a_script_that_reports_nothing_itself_tell_nothing() -> None:
    world = a_world()
    for life in range(1, 6):
        _restart_in_place(world, life, loss=None)
    assert world.status["restartsInPlace"] == 4 and "furthest" not in world.status


def test_planned_restarts_are_no_failures() -> None:
    world = a_world()
    _restart_in_place(world, 1, **_saved(40))
    for suspend in (True, False) * 3:
        world.job["spec"]["suspend"] = suspend
        world.settle_after_backoff()
    assert "restartsSince" not in world.status["furthest"]
