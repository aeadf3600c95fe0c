"""Deadlines, planned ends and requests of the user: what happens at which time."""

from datetime import timedelta
from typing import Any, Literal

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import Problem
from tests.builders import (
    DELETING,
    World,
    a_job,
    a_running_world,
    a_started_world,
    disrupted,
    ended,
    failed,
    is_idle,
    running,
    unplaced,
)

DRAINED = running(**disrupted("EvictionByEvictionAPI"))
EXCEEDED = Problem("CreateRefused", names.PODS, "mnist-0a1b2-1-0", "exceeded quota")
STOPPED = failed(75, kind="Stopped", outcome="stopped", saved=True, message="saved step 9")


def set_report(world: World, **progress: Any) -> None:
    world.progress = progress, world.pod(0)["metadata"]["name"]


def verdict(world: World) -> str:
    return str(world.status["currentAttempt"]["ending"]["verdict"])


def test_attempt_that_never_ran_fails_the_job_after_the_startup_deadline() -> None:
    world = a_started_world(a_job(startupDeadlineSeconds=600))
    world.pod(1)["status"] = unplaced()
    world.settle()
    assert world.reconcile().requeue_after == pytest.approx(600)
    world.later(600)
    failed = world.condition("Failed")
    assert failed["reason"] == "StartupDeadlineExceeded"
    assert "2 of 2 nodes have not started within 600 s" in failed["message"] and "no gpu" in failed["message"]


def refuse(world: World) -> None:
    """Let the creates of the attempt that has just started be refused."""
    world.round, world.problems = (world.status["attempt"], "begun"), (EXCEEDED,)
    world.reconcile()
    world.problems = ()
    assert verdict(world) == "CreateRefused"


def refuse_until(world: World, seconds: float) -> None:
    """Let each try to create the pods be refused for so long."""
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        wait = world.reconcile().requeue_after
        assert wait is not None
        world.forward(min(wait, (end - world.now).total_seconds()))
        if world.reconcile(crash_after=1).creates_attempt:
            refuse(world)


def test_startup_deadline_counts_from_the_first_of_several_refused_attempts() -> None:
    world = World(a_job(startupDeadlineSeconds=600))
    world.reconcile(crash_after=1)
    refuse(world)
    refuse_until(world, 590)
    assert world.status["currentAttempt"]["creatingSince"] == "2026-03-01T12:00:00Z"
    assert world.status["attempt"] > 5 and world.reconcile().requeue_after == pytest.approx(10)
    world.later(10)
    failed = world.condition("Failed")
    assert (world.status["state"], failed["reason"]) == ("Failed", "StartupDeadlineExceeded")
    assert failed["message"] == (
        "2 of 2 nodes have not started within 600 s (startupDeadlineSeconds): CreateRefused: exceeded quota"
    )


def test_startup_deadline_of_the_attempt_whose_creates_are_accepted_begins_with_it() -> None:
    world = World(a_job(startupDeadlineSeconds=600))
    world.reconcile(crash_after=1)
    refuse(world)
    refuse_until(world, 500)
    world.later(world.reconcile().requeue_after or 0)
    attempt = world.status["currentAttempt"]
    assert (attempt["phase"], "creatingSince" in attempt) == ("Running", False)
    world.run_all_and_settle()
    world.later(200)
    assert world.status["state"] == "Running"


@pytest.mark.parametrize("change", [{"suspend": True}, {"startupDeadlineSeconds": 601}])
def test_startup_deadline_begins_again_after_a_suspension_or_an_edit(change: dict[str, Any]) -> None:
    world = World(a_job(startupDeadlineSeconds=600))
    world.reconcile(crash_after=1)
    refuse(world)
    refuse_until(world, 500)
    for edit in (change, {"suspend": False}):
        world.job["spec"] |= edit
        world.job["metadata"]["generation"] += 1
        world.reconcile(crash_after=1)
    assert "creatingSince" not in world.status["currentAttempt"]
    refuse(world)
    refuse_until(world, 500)
    assert world.status["state"] == "Pending"


@pytest.mark.parametrize(
    ("prepared", "reason", "noted"), [("False", "PodNotPrepared", True), ("True", "ContainerCreating", False)]
)
def test_pod_that_does_not_start_is_shown_after_ten_seconds(prepared: str, reason: str, noted: bool) -> None:
    world = a_started_world(a_job())
    waits = [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    ready = {"type": "PodReadyToStartContainers", "status": prepared}
    status = {"phase": "Pending", "startTime": "2026-03-01T12:00:00Z", "containerStatuses": waits}
    world.set_pod(1, status | {"conditions": [ready]})
    world.show(0, {"phase": "Pending"})
    assert world.condition("Running")["reason"] == "Starting"
    assert world.reconcile().requeue_after == pytest.approx(10)
    world.forward(10)
    made = world.reconcile()
    assert world.condition("Running")["reason"] == reason
    assert "kubectl describe pod mnist-0a1b2-1-1" in world.condition("Running")["message"]
    assert [note.reason for note in made.events] == [reason] * noted
    assert world.reconcile().requeue_after is None, "at rest"


def test_attempt_that_ran_but_reports_no_step_restarts_and_counts() -> None:
    world = a_running_world(a_job(startupDeadlineSeconds=600))
    world.report({"phase": "data", "step": 0})
    world.later(600)
    assert world.status["failures"][0]["reason"] == "StartupDeadlineExceeded"
    assert (world.status["attempt"], world.status["restartsCountedTowardsLimit"]) == (2, 1)


@pytest.mark.parametrize("progress", [None, {"step": 41, "resumedFrom": {"step": 40, "path": "40.pt"}}, {"step": 1}])
def test_startup_ends_with_the_first_step_or_when_all_run_without_reports(progress: dict[str, Any] | None) -> None:
    world = a_running_world(a_job(startupDeadlineSeconds=600))
    if progress:
        world.report(progress)
    world.later(700)
    assert world.status["attempt"] == 1 and world.status["state"] == "Running"


def test_no_step_for_the_progress_deadline_restarts_and_counts() -> None:
    world = a_running_world(a_job(progressDeadlineSeconds=60))
    set_report(world, step=5, phase="train")
    world.stalled_seconds = 59.0
    world.settle()
    assert world.status["attempt"] == 1 and world.reconcile().requeue_after == pytest.approx(1)
    world.stalled_seconds = 60.0
    world.settle()
    failure = world.status["failures"][0]
    assert failure["reason"] == "ProgressDeadlineExceeded" and "step 5" in failure["message"] and failure["counted"]
    assert "nodeRank" not in failure


STALL = {"rank": 1, "step": 5, "where": "train.py:9", "message": "stalled: rank 1 (node 1) is in phase train"}


@pytest.mark.parametrize("field", ["startupDeadlineSeconds", "progressDeadlineSeconds", "completionGraceSeconds"])
def test_deadline_that_ends_an_attempt_names_the_rank_that_the_launcher_reports(field: str) -> None:
    world = a_running_world(a_job(**{field: 60}))
    set_report(world, step=0 if field == "startupDeadlineSeconds" else 5, phase="train", ageSeconds=60.0, stall=STALL)
    if field == "completionGraceSeconds":
        world.set_pod(1, ended(0))
    world.settle()
    assert "failures" not in world.status, "a stall alone ends nothing"
    world.stalled_seconds = 60.0
    world.later(60)
    failure = world.status["failures"][0]
    assert failure["reason"].endswith("DeadlineExceeded")
    assert (failure["rank"], failure["step"], failure["where"]) == (1, 5, "train.py:9")
    assert field in failure["message"] and failure["message"].endswith("; " + STALL["message"])


@pytest.mark.parametrize(
    ("problem", "what"),
    [("unreachable", "port 29501 of mnist-0a1b2-1-0 does not answer"), ("unusable", "is no progress report")],
)
def test_unknown_progress_is_shown_after_a_minute(problem: Literal["unreachable", "unusable"], what: str) -> None:
    world = a_running_world(a_job(progressDeadlineSeconds=60))
    world.progress_problem = problem  # rank 0 was asked long before all nodes ran
    world.settle()
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    assert world.reconcile().requeue_after == pytest.approx(60)
    world.forward(60)
    made = world.reconcile()
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", "ProgressUnknown") and what in running["message"]
    assert "progressDeadlineSeconds" in running["message"] and world.status["state"] == "Running"
    assert [(note.type, note.reason) for note in made.events] == [("Warning", "ProgressUnknown")]
    assert is_idle(world.reconcile()) and world.reconcile().requeue_after is None
    set_report(world, step=3)
    world.progress_problem = None
    made = world.reconcile()
    assert world.condition("Running")["reason"] == "AllNodesRunning" and not made.events


@pytest.mark.parametrize(("reports", "reason"), [(False, "AllNodesRunning"), (True, "ProgressUnknown")])
def test_progress_is_expected_without_a_deadline_only_of_a_trainer_that_reported(reports: bool, reason: str) -> None:
    world = a_running_world(a_job())
    if reports:
        world.report({"step": 3})
    world.forward(100)
    world.progress_problem = "unreachable"
    world.settle()
    assert world.condition("Running")["reason"] == reason
    assert "progressDeadlineSeconds" not in world.condition("Running")["message"]
    assert world.reconcile().requeue_after is None


@pytest.mark.parametrize("progress", [None, {"phase": "data"}, {"step": 0}])
def test_trainer_that_has_reported_no_step_is_not_ended(progress: dict[str, Any] | None) -> None:
    world = a_running_world(a_job(progressDeadlineSeconds=60))
    if progress:
        set_report(world, **progress)
    world.stalled_seconds = 9999.0
    world.settle()
    assert world.status["attempt"] == 1


def test_grace_after_the_first_success_grows_to_eight_times() -> None:
    world = a_running_world(a_job(completionGraceSeconds=100, restartPolicy={"maxRestarts": 9}))
    for grace in (100, 200, 400, 800, 800, 800):
        world.show(1, ended(0, at=world.now))
        assert world.reconcile().requeue_after == pytest.approx(grace)
        world.forward(grace)
        world.run_next_attempt()


@pytest.mark.parametrize(("age", "stalled", "attempt"), [(2.0, 250.0, 1), (None, 20.0, 1), (None, 250.0, 2)])
def test_completion_grace_does_not_pass_while_rank_0_works(age: float | None, stalled: float, attempt: int) -> None:
    """Rank 0 exports the model after its peers have ended; the age is that of its last work."""
    world = a_running_world(a_job(completionGraceSeconds=100))
    world.report({"phase": "export", "step": 9, "ageSeconds": age})
    world.show(1, ended(0))
    world.forward(301)
    world.stalled_seconds = stalled
    world.settle()
    assert world.status["attempt"] == attempt


@pytest.mark.parametrize("seen", [True, False], ids=["one request failed", "the operator started again"])
def test_completion_grace_waits_until_it_is_known_whether_rank_0_works(seen: bool) -> None:
    world = a_running_world(a_job(completionGraceSeconds=100))
    world.report({"phase": "export", "step": 9, "ageSeconds": 2.0})
    world.show(1, ended(0))
    world.forward(301)
    world.stalled_seconds = None
    world.progress = world.progress if seen else None
    world.settle()
    assert world.status["attempt"] == 1
    world.progress_problem = "unreachable"
    world.settle()
    assert world.status["attempt"] == 2, "rank 0 has been silent for a minute"


def test_completion_grace_passes_for_a_rank_that_waits_for_a_rank_0_that_ended() -> None:
    world = a_running_world(a_job(completionGraceSeconds=100))
    set_report(world, phase="export", step=9, ageSeconds=2.0)
    world.show(0, ended(0))
    world.stalled_seconds = 0.0
    world.later(101)
    assert world.status["attempt"] == 2


def test_time_in_which_nodes_only_wait_for_the_others_is_no_progress() -> None:
    """The grace is doubled to 9,600 s: a program that reports nothing and hangs at its end would restart for ever."""
    world = a_running_world(a_job())
    for _ in range(14):
        world.show(0, ended(0, at=world.now))
        world.forward(9600)
        world.settle_after_backoff()
        if world.status["state"] == "Failed":
            break
        world.run_all_and_settle()
    assert world.condition("Failed")["reason"] == "MaxRestartsExceeded" and world.status["attempt"] == 13


def test_node_zero_policy_succeeds_with_node_zero() -> None:
    world = a_running_world(a_job(successPolicy="NodeZero"))
    world.show(0, ended(0))
    assert world.status["state"] == "Succeeded"
    assert world.condition("Succeeded")["reason"] == "NodeZeroSucceeded"
    assert list(world.pods) == ["mnist-0a1b2-1-0"]


def test_node_zero_policy_waits_for_node_zero_without_a_limit() -> None:
    world = a_running_world(a_job(successPolicy="NodeZero"))
    world.show(1, ended(0))
    assert world.status["state"] == "Running" and world.reconcile().requeue_after is None
    world.later(1000)
    assert world.status["attempt"] == 1 and world.status["state"] == "Running"


def test_pod_that_waits_for_a_queue_is_not_unschedulable() -> None:
    world = a_started_world(a_job(template={"spec": {"schedulingGates": [{"name": "queue"}]}}))
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    world.pod(0)["status"] = {"phase": "Pending", "conditions": [gated]}
    world.settle()
    assert world.condition("Scheduled")["reason"] == "WaitingForScheduler"


def drain(world: World) -> None:
    """Evict the pod of node 1 while its trainer runs."""
    world.set_pod(1, DRAINED)["metadata"] |= DELETING
    made = world.reconcile()
    assert [d.name for d in made.deletes] == ["mnist-0a1b2-1-0"], "SIGTERM reaches every pod"
    assert not made.creates and verdict(world) == "Drained"


def test_drained_pods_save_together_before_the_next_attempt() -> None:
    world = a_running_world(a_job())
    world.lingering = True
    drain(world)
    world.settle()
    assert world.status["attempt"] == 1 and world.status["state"] == "Restarting"
    for rank in (0, 1):
        world.show(rank, STOPPED if rank == 0 else STOPPED | {"conditions": DRAINED["conditions"]})
        assert world.status["attempt"] == 1 + rank, "only when all have stopped"
    assert [f["reason"] for f in world.status["failures"]] == ["Drained"]
    assert (world.status["restarts"], world.status["restartsCountedTowardsLimit"]) == (1, 0)


def test_restart_request_saves_restarts_and_is_carried_out_once() -> None:
    """The time with which the job was created is no request."""
    world = a_running_world(a_job(restartedAt="2026-02-01T12:00:00Z"))
    assert world.status["attempt"] == 1 and world.status["restartedAt"] == "2026-02-01T12:00:00Z"
    world.lingering = True
    world.job["spec"]["restartedAt"] = "2026-03-01T12:00:00Z"
    made = world.reconcile()
    assert len(made.deletes) == 2 and verdict(world) == "RestartRequested"
    world.show_all(STOPPED)
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0 and "failures" not in world.status
    assert world.status["restartedAt"] == "2026-03-01T12:00:00Z"
    world.run_all_and_settle()
    assert world.status["attempt"] == 2 and world.status["state"] == "Running"


def test_undeclared_field_may_not_change_while_suspended() -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "Default"}}))
    world.suspend(True)
    world.job["spec"] |= {"template": {"spec": {"dnsPolicy": "None"}}, "suspend": False}
    world.settle()
    assert world.condition("Stalled")["reason"] == "SpecChanged" and world.status["attempt"] == 1


@pytest.mark.parametrize(("retention", "left"), [("LastAttempt", ["1", "2"]), ("All", ["1", "2"]), ("None", [])])
def test_ended_pods_are_kept_as_the_retention_says(retention: str, left: list[str]) -> None:
    world = a_running_world(a_job(podRetention=retention))
    world.fail(0)
    world.run_all_and_settle()
    world.show_all(ended(0))
    assert world.status["state"] == "Succeeded" and world.attempts() == left


def test_job_of_another_controller_is_left_alone() -> None:
    world = World(a_job(managedBy="kueue.x-k8s.io/multikueue"))
    assert world.settle() == 0 and not world.pods and not world.status
    own = a_started_world(a_job(managedBy="ddpjob.dev/operator"))
    assert len(own.pods) == 2


def test_restart_request_waits_until_a_change_of_the_template_is_undone() -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "Default"}}))
    world.edit(template={"spec": {"dnsPolicy": "None"}}, restartedAt="2026-03-01T12:00:00Z")
    assert len(world.pods) == 2 and world.condition("Stalled")["reason"] == "SpecChanged"
    world.edit(template={"spec": {"dnsPolicy": "Default"}})
    assert world.status["attempt"] == 2


def test_restart_request_is_a_normal_event_and_ends_the_row_of_failures() -> None:
    world = a_running_world(a_job())
    world.fail(0)
    world.run_all_and_settle()
    assert world.status["currentAttempt"]["failuresInRow"] == 1
    world.edit(restartedAt="2026-03-01T12:00:00Z")
    notes = [(note.type, note.reason) for made in world.plans for note in made.events]
    assert ("Normal", "RestartRequested") in notes
    assert world.status["attempt"] == 3 and "failuresInRow" not in world.status["currentAttempt"]
