"""Attempts: how one begins, fails and restarts, told reconcile by reconcile against the pure plan."""

import json
from datetime import timedelta

import pytest

from ddpjob.engine.observe import observe
from ddpjob.engine.plan import plan
from tests.builders import NOW, SETTINGS, World, a_job, a_running_world, ended, running


def test_the_first_plan_records_the_attempt_and_creates_the_pods_with_their_service_first_in_line() -> None:
    world = World(a_job())
    made = world.reconcile()
    assert made.urgent and made.status is not None
    assert made.status["attempt"] == 1
    assert [[c.name for c in phase] for phase in made.creates] == [
        ["mnist-0a1b2", "mnist-0a1b2-1-0", "mnist-0a1b2-1-1"]
    ]
    assert [note.reason for note in made.events] == ["Started"]


def test_a_first_attempt_asks_for_its_claim_even_where_one_was_seen_before() -> None:
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    world = World(a_job(checkpoint={"claimTemplate": claim}))
    world.claim = {"metadata": {"name": "mnist-checkpoints", "namespace": "default", "uid": "of-an-earlier-job"}}
    made = world.reconcile()
    assert [next(c.name for c in phase) for phase in made.creates] == ["mnist-checkpoints", "mnist-0a1b2"]
    world.run_all()
    world.settle()
    world.set_pod(1, ended(1))
    assert "mnist-checkpoints" not in [c.name for phase in world.reconcile().creates for c in phase]


def test_a_job_at_rest_is_written_nothing() -> None:
    world = a_running_world(a_job())
    world.forward(3600)
    assert world.reconcile().idle


def test_a_node_removed_after_its_pod_succeeded_is_no_failure() -> None:
    world = a_running_world(a_job())
    world.set_pod(1, ended(0))
    world.settle()
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 1
    world.set_pod(0, ended(0))
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_a_failed_node_restarts_the_group_in_one_plan() -> None:
    world = a_running_world(a_job())
    world.set_pod(1, ended(1))
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


def test_ended_pods_stay_with_their_logs_until_the_next_attempt_ends() -> None:
    world = World(a_job())
    world.settle()
    for _ in range(2):
        world.run_all()
        world.settle()
        world.set_pod(1, ended(1))
        world.settle()
    assert world.status["attempt"] == 3
    assert world.attempts() == ["2", "3"]


def test_the_budget_is_counted_in_status_and_ends_the_job() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 2}))
    for attempt in (1, 2, 3):
        world.settle()
        assert world.status["attempt"] == attempt
        world.run_all()
        world.settle()
        world.set_pod(0, ended(1))
    world.settle()
    assert world.status["state"] == "Failed"
    assert world.status["restarts"] == 2
    assert [f["action"] for f in world.status["failures"]] == ["Restart", "Restart", "Fail"]
    assert world.condition("Finished")["reason"] == "MaxRestartsExceeded"
    assert not [p for p in world.pods.values() if p["status"]["phase"] in ("Running", "Pending")]


def test_no_restart_is_left_where_max_restarts_is_zero() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.set_pod(1, ended(3))
    world.settle()
    assert world.status["state"] == "Failed" and world.status["attempt"] == 1


def test_only_the_last_five_failures_are_kept() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 10}))
    for _ in range(7):
        world.settle()
        world.run_all()
        world.settle()
        world.set_pod(0, ended(1))
        world.settle()
    assert [f["attempt"] for f in world.status["failures"]] == [3, 4, 5, 6, 7]


def test_a_pod_that_somebody_deletes_ends_the_attempt() -> None:
    world = a_running_world(a_job())
    world.pod(1)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 2
    assert world.status["failures"][0]["reason"] == "PodDeleted"


def test_a_pod_that_vanished_from_a_complete_gang_ends_the_attempt() -> None:
    world = a_running_world(a_job())
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 2
    assert world.status["failures"][0] | {"time": ""} == {
        "attempt": 1, "rank": 1, "reason": "PodLost", "action": "Restart", "counted": True, "time": "",
        "message": "the pod of node_rank 1 is gone: it was deleted, or its node was removed",
    }  # fmt: skip


def test_a_crash_between_record_and_act_is_made_good_by_creating_what_is_missing() -> None:
    world = World(a_job())
    world.reconcile()
    world.pods.clear()
    world.service = None
    made = world.reconcile()
    assert [c.name for phase in made.creates for c in phase] == [
        "mnist-0a1b2", "mnist-0a1b2-1-0", "mnist-0a1b2-1-1",
    ]  # fmt: skip
    assert world.status["attempt"] == 1


def test_pods_of_an_incomplete_gang_that_go_away_are_no_failure() -> None:
    world = World(a_job())
    world.reconcile()
    del world.pods["mnist-0a1b2-1-1"]
    world.pod(0)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.reconcile()
    assert world.status["attempt"] == 1 and "failures" not in world.status


def test_a_stale_job_is_not_acted_upon() -> None:
    world = a_running_world(a_job())
    stale = json.loads(json.dumps(world.job))
    world.set_pod(0, ended(1))
    world.settle()
    made = plan(stale, world.observed(live=True), NOW, SETTINGS)
    assert not made.creates and not made.deletes
    assert made.status is not None, "writing it under the stale resourceVersion makes the job be read anew"
    stalled = next(c for c in made.status["conditions"] if c["type"] == "Stalled")
    assert stalled["reason"] == "UnknownAttempt" and "mnist-0a1b2-2-0" in stalled["message"]


def test_decisions_that_destroy_ask_for_a_live_list_first() -> None:
    world = a_running_world(a_job())
    world.set_pod(0, ended(1))
    made = plan(world.job, world.observed(live=False), NOW, SETTINGS)
    assert made.needs_live and made.idle


def test_strays_of_an_old_attempt_are_stopped() -> None:
    world = a_running_world(a_job())
    stray = json.loads(json.dumps(world.pod(0)))
    world.set_pod(1, ended(1))
    world.settle()
    world.pods[stray["metadata"]["name"]] = stray
    made = world.reconcile()
    assert [d.uid for d in made.deletes] == [stray["metadata"]["uid"]]


@pytest.mark.parametrize("code", [0, 1])
def test_a_pod_that_has_ended_is_spared_although_its_phase_lags_behind_its_container(code: int) -> None:
    world = a_running_world(a_job(numNodes=2))
    world.set_pod(0, ended(code, phase="Running"))
    world.set_pod(1, ended(0, phase="Running"))
    made = world.reconcile()
    assert made.urgent
    assert not made.deletes, "it would take the logs along"


def test_a_pod_of_a_deleted_job_of_the_same_name_is_not_ours() -> None:
    world = World(a_job())
    world.settle()
    foreign = json.loads(json.dumps(world.pod(0)))
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert observe(world.job, [foreign]).pods == ()


def test_the_culprit_is_blamed_before_the_peers_it_took_along() -> None:
    world = a_running_world(a_job(numNodes=3))
    peer = json.dumps({"schema": 1, "cause": "peer", "code": 77, "message": "connection closed"})
    own = json.dumps({"schema": 1, "cause": "own", "rank": 2, "exception": "ValueError", "message": "bad", "step": 7})
    world.set_pod(0, ended(77, message=peer, at=NOW - timedelta(seconds=1)))
    world.set_pod(2, ended(1, message=own))
    world.settle()
    failure = world.status["failures"][0]
    assert (failure["rank"], failure["reason"]) == (2, "ValueError")
    assert "step 7" in failure["message"]


def test_a_zero_after_the_pod_was_asked_to_go_is_no_success() -> None:
    world = a_running_world(a_job(numNodes=1))
    pod = world.set_pod(0, ended(0, at=NOW + timedelta(seconds=5)))
    pod["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
    world.settle()
    assert world.status["attempt"] == 2


def test_running_again_after_status_was_wiped_does_not_meet_old_names() -> None:
    world = a_running_world(a_job())
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 2
    assert world.attempts() == ["2"]
    assert running()["phase"] == "Running"


def test_pods_taken_back_and_still_terminating_do_not_complete_a_gang() -> None:
    world = World(a_job(numNodes=4))
    world.reconcile()
    del world.pods["mnist-0a1b2-1-3"]
    for rank in range(3):
        world.pod(rank)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 1 and world.status["restarts"] == 0


def test_a_pod_that_vanishes_under_a_changed_template_is_not_made_again_beside_its_peer() -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "Default"
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "None"
    world.settle()
    assert world.status["attempt"] == 2 and world.status["failures"][0]["reason"] == "PodLost"
