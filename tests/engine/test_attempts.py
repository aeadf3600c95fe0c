"""Attempts: start, failure and restart, one reconcile at a time."""

import json
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.pod_view import pod_view
from ddpjob.engine.actions import CREATE_FAILED, Problem
from ddpjob.engine.observed import owned_pods
from ddpjob.engine.plan import plan
from tests.builders import (
    DELETING,
    NOW,
    SETTINGS,
    World,
    a_job,
    a_running_world,
    a_started_world,
    ended,
    failed,
    is_idle,
    running,
)


def test_first_plan_records_the_attempt_and_creates_service_and_pods() -> None:
    world = World(a_job())
    made = world.reconcile()
    assert made.urgent and made.status is not None
    assert made.status["attempt"] == 1
    assert [[c.name for c in phase] for phase in made.creates] == [
        ["mnist-0a1b2-1-0", "mnist-0a1b2-1-1", "mnist-0a1b2"]
    ]
    assert [c.name for phase in made.creates for c in phase if c.after_first] == ["mnist-0a1b2"]
    assert [note.reason for note in made.events] == ["Started"]


def test_first_attempt_creates_its_claim_even_if_one_is_cached() -> None:
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    world = World(a_job(checkpoint={"claimTemplate": claim}))
    world.claim = {"metadata": {"name": "mnist-checkpoints", "namespace": "default", "uid": "of-an-earlier-job"}}
    made = world.reconcile()
    assert [next(c.name for c in phase) for phase in made.creates] == ["mnist-checkpoints", "mnist-0a1b2-1-0"]
    world.run_all_and_settle()
    world.set_pod(1, ended(1))
    assert "mnist-checkpoints" not in [c.name for phase in world.reconcile().creates for c in phase]


def test_pod_removed_after_its_success_is_no_failure() -> None:
    world = a_running_world(a_job())
    world.show(1, ended(0))
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 1
    world.show(0, ended(0))
    assert world.status["state"] == "Succeeded"


def test_failed_pod_restarts_the_group_in_one_plan() -> None:
    world = a_running_world(a_job())
    world.set_pod(1, failed(1))
    made = world.reconcile()
    assert made.status is not None and made.status["attempt"] == 2
    assert [d.name for d in made.deletes] == ["mnist-0a1b2-1-0"]
    assert [c.name for phase in made.creates for c in phase] == ["mnist-0a1b2-2-0", "mnist-0a1b2-2-1"]
    assert world.status["failures"][0]["pod"] == "mnist-0a1b2-1-1"
    assert world.status["failures"][0]["exitCode"] == 1
    assert world.condition("Restarting")["status"] == "True"
    assert world.status["state"] == "Restarting"
    world.run_all_and_settle()
    assert world.status["state"] == "Running"
    assert world.condition("Restarting")["status"] == "False"


def test_job_fails_after_max_restarts_counted_in_status() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 6}))
    for attempt in range(1, 8):
        world.settle()
        assert world.status["attempt"] == attempt
        world.run_all_and_settle()
        world.set_pod(0, failed(1))
        world.settle_after_backoff()
    assert world.status["state"] == "Failed"
    assert world.status["restarts"] == 6
    assert [f["action"] for f in world.status["failures"]] == [*["Restart"] * 4, "Fail"], "the last five are kept"
    assert [f["attempt"] for f in world.status["failures"]] == [3, 4, 5, 6, 7]
    assert world.condition("Finished")["reason"] == "MaxRestartsExceeded"
    assert not [p for p in world.pods.values() if p["status"]["phase"] in ("Running", "Pending")]


def test_missing_pod_of_a_complete_gang_ends_the_attempt() -> None:
    world = a_running_world(a_job())
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 2
    assert world.status["failures"][0] | {"time": ""} == {
        "attempt": 1, "nodeRank": 1, "reason": "PodLost", "action": "Restart", "counted": False, "time": "",
        "message": "the pod of node_rank 1 is gone: it was deleted, or its node was removed",
        "hint": "the pod was deleted with --force, or together with its Kubernetes node",
        "next": "nothing; training continues from the checkpoint",
    }  # fmt: skip
    assert (world.status["restarts"], world.status["restartsCountedTowardsLimit"]) == (1, 0)


@pytest.mark.parametrize("bound", [False, True])
def test_pod_that_appears_in_place_of_one_that_ran_does_not_hide_its_loss(bound: bool) -> None:
    world = a_running_world(a_job())
    late = {"uid": "a create whose response was lost is carried out late", "creationTimestamp": "2026-03-01T12:00:01Z"}
    world.pod(1)["metadata"] |= late
    world.pod(1)["status"] = {"phase": "Pending"} | ({"startTime": "2026-03-01T12:00:01Z"} if bound else {})
    world.settle()
    assert world.status["attempt"] == 2
    assert [failure["reason"] for failure in world.status["failures"]] == ["PodLost"]
    assert world.attempts() == ["2"]


def test_running_pod_that_its_kubelet_shows_as_pending_for_a_moment_is_not_lost() -> None:
    world = a_running_world(a_job())
    world.forward(60)
    world.show(1, {"phase": "Pending", "startTime": "2026-03-01T12:00:01Z"})
    assert "failures" not in world.status and world.status["attempt"] == 1
    world.run_all_and_settle()
    assert world.status["state"] == "Running"


def test_pod_that_runs_while_its_phase_is_still_pending_is_not_lost() -> None:
    """The kubelet keeps the phase until the containers have ended, of a pod whose deadline passed as they started."""
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 0}))
    for rank in range(2):
        world.show(rank, running(phase="Pending"))
    assert world.status["state"] == "Running"
    world.show_all(ended(137) | {"phase": "Failed", "reason": "DeadlineExceeded"})
    assert [failure["reason"] for failure in world.status["failures"]] == ["PodDeadlineExceeded"]


def test_missing_pods_are_created_after_a_crash_between_record_and_act() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)
    assert not world.pods and world.service is None
    made = plan(world.job, world.observed(live=False), NOW, SETTINGS)
    assert made.needs_live and is_idle(made), "the process before may have created them, and the cache is stale"
    made = world.reconcile()
    assert [c.name for phase in made.creates for c in phase] == [
        "mnist-0a1b2-1-0", "mnist-0a1b2-1-1", "mnist-0a1b2",
    ]  # fmt: skip
    assert world.status["attempt"] == 1


def test_pod_drained_before_a_new_operator_recorded_that_all_exist_saves_a_checkpoint() -> None:
    world = World(a_job())
    world.reconcile()
    world.run_all()
    assert world.status["currentAttempt"]["phase"] == "Creating"
    world.round = None  # the operator was killed; the training goes on
    world.pod(1)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert [failure["reason"] for failure in world.status["failures"]] == ["PodDeleted"]
    assert world.status["attempt"] == 1, "the trainers save a checkpoint before the next attempt starts"
    world.later(36)
    assert world.status["attempt"] == 2


def test_plan_for_a_stale_job_writes_its_status_first() -> None:
    world = a_running_world(a_job())
    stale = json.loads(json.dumps(world.job))
    world.fail(0)
    assert world.status["attempt"] == 2
    made = plan(stale, world.observed(live=True), NOW, SETTINGS)
    assert made.status is not None and made.urgent, "the write conflicts, and the job is read again"
    assert not made.creates
    assert made.status["currentAttempt"]["ending"]["verdict"] == "UnknownAttempt"


@pytest.mark.parametrize("number", [0, 1])
def test_pods_of_an_unknown_attempt_are_deleted_only_after_a_status_that_knows_it(number: int) -> None:
    """The cached job may be older than the pods: another operator has resumed it meanwhile."""
    world = World(a_job(suspend=True)) if number == 0 else a_running_world(a_job())
    world.suspend(True)
    stale = world.status
    world.suspend(False)
    world.run_all_and_settle()
    newest = number + 1
    world.job["spec"]["suspend"], world.job["status"] = True, stale
    made = world.reconcile()
    assert len(made.deletes) == 2 and made.status is not None, "the write conflicts if the job is stale"
    attempt = world.status["currentAttempt"]
    assert (world.status["attempt"], attempt["number"], attempt["ending"]["verdict"]) == (newest, newest, "Suspended")
    assert world.status["state"] == "Suspended"
    world.settle()
    world.suspend(False)
    assert (world.status["attempt"], world.status["restarts"]) == (newest + 1, 0)


@pytest.mark.parametrize("attempt", ["2", "99999"])
def test_forged_pod_of_a_later_attempt_does_not_disturb_the_training(attempt: str) -> None:
    world = a_running_world(a_job())
    forged = json.loads(json.dumps(world.pod(0)))
    forged["metadata"] |= {"name": "forged", "uid": "forged"}
    forged["metadata"]["labels"][names.LABEL_ATTEMPT] = attempt
    world.pods["forged"] = forged
    world.settle()
    assert (world.status["attempt"], world.status["state"]) == (1, "Running") and "forged" in world.pods
    for _ in range(3):
        world.set_pod(1, ended(139))
        world.run_next_attempt()
    assert world.status["restarts"] == 3 and world.status["attempt"] <= 5, "the number of pods is not an attempt's"


def test_destructive_decisions_require_a_live_list() -> None:
    world = a_running_world(a_job())
    world.set_pod(0, ended(1))
    made = plan(world.job, world.observed(live=False), NOW, SETTINGS)
    assert made.needs_live and is_idle(made)


def test_pods_of_an_older_attempt_are_deleted() -> None:
    world = a_running_world(a_job())
    stray = json.loads(json.dumps(world.pod(0)))
    world.fail(1)
    world.pods[stray["metadata"]["name"]] = stray
    cached = plan(world.job, world.observed(live=False), world.now, SETTINGS)
    assert cached.needs_live and is_idle(cached), "its trainer may have ended, and its log is kept"
    made = world.reconcile()
    assert [d.uid for d in made.deletes] == [stray["metadata"]["uid"]]


def test_pod_of_a_deleted_job_of_the_same_name_is_ignored() -> None:
    world = a_started_world(a_job())
    other = json.loads(json.dumps(world.pod(0)))
    other["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert owned_pods(world.job, [pod_view(other)]) == []


def test_rank_whose_script_had_ended_is_not_to_blame_if_another_node_failed_by_itself() -> None:
    """A rank of node 0 may do less than the others; its peers there lost a rank of node 1."""
    world = a_running_world(a_job())
    world.set_pod(0, failed(1, cause="own", kind="ExitedEarly", exception="ExitedEarly", rank=0, message="m"))
    world.fail(1, 137, cause="own", kind="Killed", signal=9, rank=2, message="killed by SIGKILL")
    failure = world.status["failures"][0]
    assert (failure["nodeRank"], failure["rank"]) == (1, 2), failure


@pytest.mark.parametrize(
    ("message", "attempts"),
    [("", 2), ('{"outcome": "succeeded"}', 2), ('{"outcome": "succeeded", "beforeStop": true}', 1)],
)
def test_exit_0_after_the_deletion_of_the_pod_is_no_success_unless_a_launcher_says_so(
    message: str, attempts: int
) -> None:
    world = a_running_world(a_job(numNodes=1))
    pod = world.set_pod(0, ended(0, at=NOW + timedelta(seconds=5), message=message))
    pod["metadata"] |= DELETING
    world.settle()
    assert world.status["attempt"] == attempts


def test_job_whose_training_ended_before_its_suspension_has_succeeded() -> None:
    """Ctrl-C at a `ddpjob run` whose script had returned, with a thread that did not end: it would train again."""
    for before_stop, state in (("false", "Suspended"), ("true", "Succeeded")):
        world = a_running_world(a_job())
        world.job["spec"]["suspend"] = True
        world.reconcile(crash_after=1)
        assert world.status["state"] == "Suspended"
        for rank in (0, 1):
            pod = world.set_pod(rank, ended(0, message=f'{{"beforeStop": {before_stop}}}'))
            pod["metadata"] |= DELETING
        world.settle()
        assert world.status["state"] == state
        world.suspend(False)
        assert world.status["attempt"] == (1 if state == "Succeeded" else 2)


def test_node_that_succeeds_while_another_one_needs_it_is_to_blame_for_the_lost_peer() -> None:
    """Under ddprun and under torchrun: in each attempt "a peer was lost", and its node was suspected to be down."""
    world = a_running_world(a_job(numNodes=3))
    world.show(2, ended(0, at=NOW + timedelta(seconds=1)))
    for rank in (0, 1):
        world.fail(rank, 77, cause="peer", at=NOW + timedelta(seconds=2), kind="PeerLost", message="closed")
    failure = world.status["failures"][0]
    assert (failure["reason"], failure["nodeRank"], failure["exitCode"]) == ("ExitedEarly", 2, 0)
    assert "its script ended with exit code 0, and node_rank 0" in failure["message"]
    assert failure["action"] == "Restart" and failure["counted"]


def test_running_pods_of_attempt_1_are_adopted_if_no_status_records_them() -> None:
    world = a_running_world(a_job())
    uids = [pod["metadata"]["uid"] for pod in world.pods.values()]
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 1 and world.status["state"] == "Running"
    assert [pod["metadata"]["uid"] for pod in world.pods.values()] == uids


def test_terminating_pods_do_not_complete_a_gang() -> None:
    world = World(a_job(numNodes=4))
    world.reconcile(crash_after=4)
    for rank in range(2):
        world.pod(rank)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0
    assert len([pod for pod in world.pods.values() if "deletionTimestamp" not in pod["metadata"]]) == 4


UNREADY: list[tuple[dict[str, Any], int]] = [
    (failed(69, message="rank 1 is missing"), 0),
    (failed(81, cause="peer"), 0),
    (ended(1), 0),
    (failed(1), 1),
]


@pytest.mark.parametrize(("end", "counted"), UNREADY, ids=["rendezvous", "peer", "no report", "own"])
def test_pod_whose_peer_cannot_be_created_costs_no_restart(end: dict[str, Any], counted: int) -> None:
    """The API server refuses a create for longer than the timeout of the rendezvous."""
    world = World(a_job())
    world.reconcile()
    missing = world.pod(1)["metadata"]["name"]
    del world.pods[missing]
    world.problems = (Problem(CREATE_FAILED, names.PODS, missing, "no answer from the webhook"),)
    world.round = 1, "begun"
    world.set_pod(0, end)
    world.reconcile()
    assert world.status["restartsCountedTowardsLimit"] == counted
    assert bool(world.status.get("failures")) == bool(counted)
    world.problems = ()
    world.settle()
    assert world.status["attempt"] == 2 and len(world.pods) == 2 + counted
