"""Annotations of running pods with the last checkpoint and the progress: what they say, and how seldom they change."""

from dataclasses import replace
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Change, Plan
from tests.builders import SETTINGS, World, a_job, a_running_world, failed, running

ASKED = {"scheduling": {"annotatePods": True}}
RANK_0 = "mnist-0a1b2-1-0"


def report(world: World, percent: int, saved: int | None = None) -> None:
    checkpoint = {"step": saved, "path": f"{saved}.pt"} if saved is not None else None
    world.progress = ({"phase": "train", "step": percent, "totalSteps": 100, "checkpoint": checkpoint}, RANK_0)


def patched(made: Plan) -> list[str]:
    return [change.name for change in made.changes if change.annotations]


def of_pod(world: World, rank: int) -> dict[str, Any]:
    found = world.pod(rank)["metadata"].get("annotations", {})
    shown = (names.ANNOTATION_CHECKPOINT_TIME, names.ANNOTATION_PROGRESS, names.ANNOTATION_PROGRESS_TIME)
    return {name.partition("/")[2]: found[name] for name in shown if name in found}


def test_pods_of_a_job_that_asks_carry_its_last_checkpoint_and_its_progress() -> None:
    world = a_running_world(a_job(**ASKED))
    assert of_pod(world, 0) == {}, "nothing is known yet"
    report(world, 20, saved=20)
    saved_at = timestamp(world.now)
    world.settle()
    expected = {"last-checkpoint-time": saved_at, "progress": "20%", "progress-time": saved_at}
    assert of_pod(world, 0) == of_pod(world, 1) == expected
    assert world.status["checkpoint"]["time"] == saved_at and world.status["state"] == "Running"


def test_the_step_is_the_progress_of_a_training_of_unknown_length() -> None:
    world = a_running_world(a_job(**ASKED))
    world.progress = ({"phase": "train", "step": 1200}, RANK_0)
    world.settle()
    assert of_pod(world, 1) == {"progress": "1200", "progress-time": timestamp(world.now)}


@pytest.mark.parametrize("spec", [{}, {"scheduling": {"annotatePods": False}}, {"scheduling": {}}])
def test_no_pod_is_annotated_by_default(spec: dict[str, Any]) -> None:
    world = a_running_world(a_job(**spec))
    report(world, 20, saved=20)
    world.settle()
    assert of_pod(world, 0) == {}


def test_nothing_is_annotated_where_no_scheduler_reads_it() -> None:
    world = a_running_world(a_job(**ASKED))
    world.settings = replace(SETTINGS, gang_scheduler=None)
    report(world, 20, saved=20)
    world.settle()
    assert of_pod(world, 0) == {}


def test_a_pod_is_patched_at_most_once_a_minute_whatever_is_reported() -> None:
    """One report a second for ten minutes, with a checkpoint every seven seconds; the operator restarts meanwhile."""
    world = a_running_world(a_job(**ASKED))
    times: dict[str, list[int]] = {}
    for second in range(600):
        report(world, second // 6, saved=second // 7)
        if second % 97 == 0:
            world.round, world.problems = None, ()  # a new operator: nothing is left in memory
        for name in patched(world.reconcile()):
            times.setdefault(name, []).append(second)
        world.forward(1)
    assert times == {name: list(range(0, 600, 60)) for name in (RANK_0, "mnist-0a1b2-1-1")}


def test_unchanged_values_are_not_written_again() -> None:
    world = a_running_world(a_job(**ASKED))
    report(world, 20, saved=20)
    world.settle()
    world.forward(3600)
    assert not patched(world.reconcile())


def test_a_change_within_the_minute_is_written_at_its_end_without_an_event() -> None:
    world = a_running_world(a_job(**ASKED))
    report(world, 20)
    world.settle()
    world.forward(10)
    report(world, 21, saved=21)
    made = world.reconcile()
    assert not patched(made) and made.requeue_after == 50
    world.forward(50)
    assert len(patched(world.reconcile())) == 2


@pytest.mark.parametrize("writes", [1, 2])
def test_a_crash_between_writes_leaves_only_the_other_pods_to_patch(writes: int) -> None:
    world = a_running_world(a_job(**ASKED))
    report(world, 20, saved=20)
    world.reconcile(crash_after=writes)  # the status, then the pods
    world.forward(5)
    first = timestamp(world.now)
    assert len(patched(world.reconcile())) == 3 - writes
    assert of_pod(world, 1)["progress-time"] == first
    assert not patched(world.reconcile())


def test_many_pods_are_patched_in_small_groups() -> None:
    world = a_running_world(a_job(numNodes=40, **ASKED))
    report(world, 20, saved=20)
    groups = [world.reconcile() for _ in range(3)]
    assert [len(patched(made)) for made in groups] == [16, 16, 8]
    assert [made.requeue_after for made in groups[:2]] == [1, 1]
    assert len({name for made in groups for name in patched(made)}) == 40


def test_pods_of_a_large_job_are_patched_less_often() -> None:
    world = a_running_world(a_job(numNodes=1200, **ASKED))
    report(world, 20)
    while patched(world.reconcile()):
        pass
    report(world, 21)
    world.forward(119)
    assert not patched(world.reconcile())
    world.forward(1)
    assert patched(world.reconcile())


def test_only_pods_that_run_and_stay_are_patched() -> None:
    world = World(a_job(numNodes=3, **ASKED))
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(2, {"phase": "Running"})
    report(world, 20, saved=20)
    assert patched(world.reconcile()) == [RANK_0, "mnist-0a1b2-1-1"]
    world.forward(60)
    report(world, 30, saved=30)
    world.set_pod(1, failed(1))
    assert not patched(world.reconcile()), "the attempt ends"


@pytest.mark.parametrize("time", ["soon", "2026-03-01", "2026-03-01T12:00:00", "2027-01-01T00:00:00Z", "x" * 300_000])
def test_a_time_that_a_user_wrote_delays_nothing(time: str) -> None:
    world = a_running_world(a_job(**ASKED))
    world.pod(0)["metadata"]["annotations"] = {names.ANNOTATION_PROGRESS_TIME: time}
    report(world, 20)
    world.settle()
    assert of_pod(world, 0) == {"progress": "20%", "progress-time": timestamp(world.now)}


def test_the_patch_changes_annotations_only() -> None:
    world = a_running_world(a_job(**ASKED))
    report(world, 20)
    change: Change = world.reconcile().changes[0]
    assert change.body["spec"] == {} and change.body["metadata"].keys() == {"uid", "annotations"}


def test_pods_of_an_attempt_that_is_being_created_are_not_annotated() -> None:
    world = a_running_world(a_job(**ASKED))
    report(world, 20, saved=20)
    world.settle()
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["attempt"] == 2 and world.status["checkpoint"]
    world.set_pod(0, running())
    assert patched(world.reconcile()) == []
