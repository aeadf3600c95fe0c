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
from tests.builders import NOW, SETTINGS, World, a_job, a_running_world, ended, failed, is_idle, running


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
    world.run_all()
    world.settle()
    world.set_pod(1, ended(1))
    assert "mnist-checkpoints" not in [c.name for phase in world.reconcile().creates for c in phase]


def test_job_at_rest_gets_no_writes() -> None:
    world = a_running_world(a_job())
    world.forward(3600)
    assert is_idle(world.reconcile())


def test_pod_removed_after_its_success_is_no_failure() -> None:
    world = a_running_world(a_job())
    world.set_pod(1, ended(0))
    world.settle()
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 1
    world.set_pod(0, ended(0))
    world.settle()
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
    world.run_all()
    world.settle()
    assert world.status["state"] == "Running"
    assert world.condition("Restarting")["status"] == "False"


def test_ended_pods_are_kept_until_the_next_attempt_ends() -> None:
    world = World(a_job())
    world.settle()
    for _ in range(2):
        world.run_all()
        world.settle()
        world.set_pod(1, failed(1))
        world.settle_after_backoff()
    assert world.status["attempt"] == 3
    assert world.attempts() == ["2", "3"]


def test_job_fails_after_max_restarts_counted_in_status() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 2}))
    for attempt in (1, 2, 3):
        world.settle()
        assert world.status["attempt"] == attempt
        world.run_all()
        world.settle()
        world.set_pod(0, failed(1))
        world.settle_after_backoff()
    assert world.status["state"] == "Failed"
    assert world.status["restarts"] == 2
    assert [f["action"] for f in world.status["failures"]] == ["Restart", "Restart", "Fail"]
    assert world.condition("Finished")["reason"] == "MaxRestartsExceeded"
    assert not [p for p in world.pods.values() if p["status"]["phase"] in ("Running", "Pending")]


def test_first_failure_fails_a_job_with_max_restarts_zero() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.set_pod(1, failed(3))
    world.settle()
    assert world.status["state"] == "Failed" and world.status["attempt"] == 1


def test_only_the_last_five_failures_are_kept() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 10}))
    for _ in range(7):
        world.settle()
        world.run_all()
        world.settle()
        world.set_pod(0, failed(1))
        world.settle_after_backoff()
    assert [f["attempt"] for f in world.status["failures"]] == [3, 4, 5, 6, 7]


def test_deleted_pod_ends_the_attempt() -> None:
    world = a_running_world(a_job())
    world.pod(1)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["failures"][0]["reason"] == "PodDeleted"
    assert world.status["attempt"] == 1, "its trainer may still save a checkpoint"
    world.forward(36)
    world.settle()
    assert world.status["attempt"] == 2


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
    world.set_pod(1, {"phase": "Pending", "startTime": "2026-03-01T12:00:01Z"})
    world.settle()
    assert "failures" not in world.status and world.status["attempt"] == 1
    world.run_all()
    world.settle()
    assert world.status["state"] == "Running"


def test_pod_that_runs_while_its_phase_is_still_pending_is_not_lost() -> None:
    """The kubelet keeps the phase until the containers have ended, of a pod whose deadline passed as they started."""
    world = World(a_job(restartPolicy={"maxRestarts": 0}))
    world.settle()
    for rank in range(2):
        world.set_pod(rank, running(phase="Pending"))
        world.settle()
    assert world.status["state"] == "Running"
    for rank in range(2):
        world.set_pod(rank, ended(137) | {"phase": "Failed", "reason": "DeadlineExceeded"})
    world.settle()
    assert [failure["reason"] for failure in world.status["failures"]] == ["PodDeadlineExceeded"]


def test_pod_that_has_not_started_yet_is_not_lost() -> None:
    world = World(a_job())
    world.settle()
    world.set_pod(0, running())
    world.settle()
    assert world.status["attempt"] == 1 and not world.status.get("failures")


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


def test_deleted_pod_of_an_incomplete_gang_is_no_failure() -> None:
    world = World(a_job())
    world.reconcile(crash_after=3)
    world.pod(0)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0 and "failures" not in world.status


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
    world.forward(36)
    world.settle()
    assert world.status["attempt"] == 2


def test_plan_for_a_stale_job_writes_its_status_first() -> None:
    world = a_running_world(a_job())
    stale = json.loads(json.dumps(world.job))
    world.set_pod(0, failed(1))
    world.settle()
    assert world.status["attempt"] == 2
    made = plan(stale, world.observed(live=True), NOW, SETTINGS)
    assert made.status is not None and made.urgent, "the write conflicts, and the job is read again"
    assert not made.creates
    assert made.status["currentAttempt"]["ending"]["verdict"] == "UnknownAttempt"


@pytest.mark.parametrize("number", [0, 1])
def test_pods_of_an_unknown_attempt_are_deleted_only_after_a_status_that_knows_it(number: int) -> None:
    """The cached job may be older than the pods: another operator has resumed it meanwhile."""
    world = World(a_job(suspend=True)) if number == 0 else a_running_world(a_job())
    world.job["spec"]["suspend"] = True
    world.settle()
    stale = world.status
    world.job["spec"]["suspend"] = False
    world.settle()
    world.run_all()
    world.settle()
    newest = number + 1
    world.job["spec"]["suspend"], world.job["status"] = True, stale
    made = world.reconcile()
    assert len(made.deletes) == 2 and made.status is not None, "the write conflicts if the job is stale"
    attempt = world.status["currentAttempt"]
    assert (world.status["attempt"], attempt["number"], attempt["ending"]["verdict"]) == (newest, newest, "Suspended")
    assert world.status["state"] == "Suspended"
    world.settle()
    world.job["spec"]["suspend"] = False
    world.settle()
    assert (world.status["attempt"], world.status["restarts"]) == (newest + 1, 0)


def test_restored_status_leads_to_an_attempt_with_new_pod_names() -> None:
    world = a_running_world(a_job())
    backup = json.loads(json.dumps(world.job["status"]))
    for _ in range(2):
        world.set_pod(0, failed(1))
        world.settle_after_backoff()
        world.run_all()
        world.settle()
    world.job["status"] = backup
    world.settle()
    assert world.status["attempt"] == 4 and world.status["restarts"] == 0
    assert world.attempts() == ["4"]


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
        world.settle_after_backoff()
        world.run_all()
        world.settle()
    assert world.status["restarts"] == 3 and world.status["attempt"] <= 5, "the number of pods is not an attempt's"


def test_destructive_decisions_require_a_live_list() -> None:
    world = a_running_world(a_job())
    world.set_pod(0, ended(1))
    made = plan(world.job, world.observed(live=False), NOW, SETTINGS)
    assert made.needs_live and is_idle(made)


def test_pods_of_an_older_attempt_are_deleted() -> None:
    world = a_running_world(a_job())
    stray = json.loads(json.dumps(world.pod(0)))
    world.set_pod(1, failed(1))
    world.settle()
    world.pods[stray["metadata"]["name"]] = stray
    cached = plan(world.job, world.observed(live=False), world.now, SETTINGS)
    assert cached.needs_live and is_idle(cached), "its trainer may have ended, and its log is kept"
    made = world.reconcile()
    assert [d.uid for d in made.deletes] == [stray["metadata"]["uid"]]


@pytest.mark.parametrize("code", [0, 1])
def test_ended_pod_is_kept_even_if_its_phase_is_still_running(code: int) -> None:
    world = a_running_world(a_job(numNodes=2))
    world.set_pod(0, ended(code, phase="Running"))
    world.set_pod(1, ended(0, phase="Running"))
    made = world.reconcile()
    assert made.urgent
    assert not made.deletes, "it would take the logs along"


def test_pod_of_a_deleted_job_of_the_same_name_is_ignored() -> None:
    world = World(a_job())
    world.settle()
    other = json.loads(json.dumps(world.pod(0)))
    other["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert owned_pods(world.job, [pod_view(other)]) == []


def test_root_cause_is_the_pod_with_a_failure_of_its_own() -> None:
    world = a_running_world(a_job(numNodes=3))
    peer = json.dumps({"schema": 1, "cause": "peer", "code": 77, "message": "connection closed"})
    own = json.dumps({"schema": 1, "cause": "own", "rank": 2, "exception": "ValueError", "message": "bad", "step": 7})
    world.set_pod(0, ended(77, message=peer, at=NOW - timedelta(seconds=1)))
    world.set_pod(2, ended(1, message=own))
    world.settle()
    failure = world.status["failures"][0]
    assert (failure["nodeRank"], failure["rank"], failure["reason"]) == (2, 2, "ValueError")
    assert "step 7" in failure["message"]


def test_rank_whose_script_had_ended_is_not_to_blame_if_another_node_failed_by_itself() -> None:
    """A rank of node 0 may do less than the others; its peers there lost a rank of node 1."""
    world = a_running_world(a_job())
    world.set_pod(0, failed(1, cause="own", kind="ExitedEarly", exception="ExitedEarly", rank=0, message="m"))
    world.set_pod(1, failed(137, cause="own", kind="Killed", signal=9, rank=2, message="killed by SIGKILL"))
    world.settle()
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
    pod["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
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
            pod["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
        world.settle()
        assert world.status["state"] == state
        world.job["spec"]["suspend"] = False
        world.settle()
        assert world.status["attempt"] == (1 if state == "Succeeded" else 2)


def test_node_that_succeeds_while_another_one_needs_it_is_to_blame_for_the_lost_peer() -> None:
    """Under ddprun and under torchrun: in each attempt "a peer was lost", and its node was suspected to be down."""
    world = a_running_world(a_job(numNodes=3))
    world.set_pod(2, ended(0, at=NOW + timedelta(seconds=1)))
    world.settle()
    for rank in (0, 1):
        world.set_pod(rank, failed(77, cause="peer", at=NOW + timedelta(seconds=2), kind="PeerLost", message="closed"))
        world.settle()
    failure = world.status["failures"][0]
    assert (failure["reason"], failure["nodeRank"], failure["exitCode"]) == ("ExitedEarly", 2, 0)
    assert "its script ended with exit code 0, and node_rank 0" in failure["message"]
    assert failure["action"] == "Restart" and failure["counted"]


def test_attempt_after_a_deleted_status_uses_new_pod_names() -> None:
    world = a_running_world(a_job())
    world.set_pod(0, failed(1))
    world.settle()
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 3
    assert world.attempts() == ["3"]


def test_running_pods_of_attempt_1_are_adopted_if_no_status_records_them() -> None:
    world = a_running_world(a_job())
    uids = [pod["metadata"]["uid"] for pod in world.pods.values()]
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 1 and world.status["state"] == "Running"
    assert [pod["metadata"]["uid"] for pod in world.pods.values()] == uids


def a_world_after_deletion(**metadata: Any) -> World:
    """Return the world of a job that was applied again while rank 0 of the deleted job of its name runs."""
    world = World(a_job())
    world.job["metadata"]["creationTimestamp"] = "2026-03-01T12:00:00Z"
    meta = {"name": "mnist-99999-1-0", "uid": "old", "ownerReferences": [{"uid": "99999", "controller": True}]}
    labels = {names.LABEL_JOB_NAME: "mnist", names.LABEL_JOB_UID: "99999"}
    world.former.append({"metadata": meta | {"labels": labels} | metadata, "spec": {}, "status": running()})
    return world


DELETED = {"deletionTimestamp": "2026-03-01T12:01:30Z", "deletionGracePeriodSeconds": 90}


def test_first_attempt_waits_for_the_pods_of_a_deleted_job_of_its_name() -> None:
    world = a_world_after_deletion(**DELETED)
    world.settle()
    assert not world.pods and world.status["state"] == "Pending"
    assert world.condition("Running")["reason"] == "FormerPodsRun"
    assert "mnist-99999-1-0" in world.condition("Running")["message"]
    world.former[0]["status"] = ended(143)
    world.settle()
    assert len(world.pods) == 2 and world.status["attempt"] == 1


def test_pods_of_a_deleted_job_are_waited_for_up_to_their_deletion_deadline() -> None:
    """Their Kubernetes node may be down."""
    world = a_world_after_deletion(**DELETED)
    world.settle()
    assert world.reconcile().requeue_after == pytest.approx(95)
    world.forward(95)
    world.settle()
    assert len(world.pods) == 2


def test_pods_of_a_deleted_job_that_are_not_deleted_yet_are_waited_for() -> None:
    """The garbage collector may be down; the pods run on."""
    world = a_world_after_deletion()
    world.settle()
    world.forward(3600)
    world.settle()
    assert not world.pods and "nothing has deleted it" in world.condition("Running")["message"]


def test_terminating_pods_do_not_complete_a_gang() -> None:
    world = World(a_job(numNodes=4))
    world.reconcile(crash_after=4)
    for rank in range(2):
        world.pod(rank)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0
    assert len([pod for pod in world.pods.values() if "deletionTimestamp" not in pod["metadata"]]) == 4


def test_missing_pod_is_not_recreated_from_a_changed_template() -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "Default"
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "None"
    world.settle()
    assert world.status["attempt"] == 2 and world.status["failures"][0]["reason"] == "PodLost"


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
