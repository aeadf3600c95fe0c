"""Lives of a job, told reconcile by reconcile against the pure plan."""

import json
from datetime import timedelta

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import Problem
from ddpjob.engine.observe import observe
from ddpjob.engine.plan import plan
from tests.builders import NOW, SETTINGS, UID, World, a_job, ended, running


def test_the_first_plan_records_the_attempt_and_creates_service_then_pods() -> None:
    world = World(a_job())
    made = world.reconcile()
    assert made.urgent and made.status is not None
    assert made.status["attempt"] == 1
    assert [[c.name for c in phase] for phase in made.creates] == [
        ["mnist-0a1b2"],
        ["mnist-0a1b2-1-0", "mnist-0a1b2-1-1"],
    ]
    assert [note.reason for note in made.events] == ["Started"]


def test_a_job_at_rest_is_written_nothing() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    world.forward(3600)
    assert world.reconcile().idle


def test_all_nodes_running_is_said_once_and_shown_in_every_field() -> None:
    world = World(a_job(nprocPerNode=2))
    world.settle()
    world.run_all()
    made = world.reconcile()
    assert [note.reason for note in made.events] == ["Running"]
    assert world.status["state"] == "Running"
    assert world.status["nodesReady"] == "2/2"
    assert world.status["world"]["worldSize"] == 4
    assert world.status["world"]["masterAddress"] == "mnist-0a1b2-1-0.mnist-0a1b2.default.svc.cluster.local:29500"
    assert world.condition("Scheduled")["status"] == "True"
    assert world.condition("Reconciling")["status"] == "False"
    assert world.reconcile().idle


def test_every_condition_is_set_from_the_first_visit() -> None:
    world = World(a_job())
    world.reconcile()
    kinds = [condition["type"] for condition in world.status["conditions"]]
    assert kinds == [
        "Scheduled", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Finished", "Reconciling", "Stalled",
    ]  # fmt: skip
    assert all(condition["reason"] for condition in world.status["conditions"])


def test_success_of_every_node_finishes_the_job_and_keeps_its_pods() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    for rank in (0, 1):
        world.set_pod(rank, ended(0))
        world.settle()
    assert world.status["state"] == "Succeeded"
    assert world.condition("Finished")["status"] == world.condition("Succeeded")["status"] == "True"
    assert world.condition("Failed")["status"] == "False"
    assert len(world.pods) == 2
    assert "completionTime" in world.status


def test_a_node_removed_after_its_pod_succeeded_is_no_failure() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(1, ended(0))
    world.settle()
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 1
    world.set_pod(0, ended(0))
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_a_failed_node_restarts_the_group_in_one_plan() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
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
    world = World(a_job(restartPolicy={"maxRestarts": 0}))
    world.settle()
    world.run_all()
    world.settle()
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
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    world.pod(1)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:30Z"
    world.settle()
    assert world.status["attempt"] == 2
    assert world.status["failures"][0]["reason"] == "PodDeleted"


def test_a_pod_that_vanished_from_a_complete_gang_ends_the_attempt() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    del world.pods["mnist-0a1b2-1-1"]
    world.settle()
    assert world.status["attempt"] == 2
    assert world.status["failures"][0] | {"time": ""} == {
        "attempt": 1, "rank": 1, "reason": "PodLost", "action": "Restart", "counted": True, "time": "",
        "message": "the pod of node_rank 1 vanished: it was deleted, or its node was removed",
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
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    stale = json.loads(json.dumps(world.job))
    world.set_pod(0, ended(1))
    world.settle()
    made = plan(stale, world.observed(live=True), NOW, SETTINGS)
    assert made.idle and made.requeue_after is not None


def test_decisions_that_destroy_ask_for_a_live_list_first() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(0, ended(1))
    made = plan(world.job, world.observed(live=False), NOW, SETTINGS)
    assert made.needs_live and made.idle


def test_strays_of_an_old_attempt_are_stopped() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    stray = json.loads(json.dumps(world.pod(0)))
    world.set_pod(1, ended(1))
    world.settle()
    world.pods[stray["metadata"]["name"]] = stray
    made = world.reconcile()
    assert [d.uid for d in made.deletes] == [stray["metadata"]["uid"]]


def test_a_pod_of_a_deleted_job_of_the_same_name_is_not_ours() -> None:
    world = World(a_job())
    world.settle()
    foreign = json.loads(json.dumps(world.pod(0)))
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert observe(world.job, [foreign]).pods == ()


def test_suspend_stops_the_pods_and_resume_begins_an_attempt_that_costs_nothing() -> None:
    world = World(a_job(restartPolicy={"maxRestarts": 0}))
    world.settle()
    world.run_all()
    world.settle()
    world.forward(100)
    world.job["spec"]["suspend"] = True
    world.settle()
    assert world.status["state"] == "Suspended" and not world.pods
    assert world.status["activeSeconds"] == 100
    world.forward(1000)
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0
    assert world.condition("Suspended")["status"] == "False"
    world.run_all()
    world.settle()
    assert world.status["state"] == "Running"


def test_a_job_created_suspended_makes_nothing_until_it_is_resumed() -> None:
    world = World(a_job(suspend=True))
    world.settle()
    assert world.status["state"] == "Suspended" and not world.pods and world.service is None
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.status["attempt"] == 1 and len(world.pods) == 2


def test_the_active_deadline_stands_still_while_suspended() -> None:
    world = World(a_job(activeDeadlineSeconds=150))
    world.settle()
    world.run_all()
    world.settle()
    world.forward(100)
    world.job["spec"]["suspend"] = True
    world.settle()
    world.forward(500)
    world.job["spec"]["suspend"] = False
    world.settle()
    world.run_all()
    world.settle()
    world.forward(49)
    made = world.reconcile()
    assert made.requeue_after == pytest.approx(1)
    world.forward(2)
    world.settle()
    assert world.status["state"] == "Failed"
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert not world.pods


def test_ttl_deletes_a_finished_job_with_its_uid() -> None:
    world = World(a_job(numNodes=1, ttlSecondsAfterFinished=60))
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(0, ended(0))
    world.settle()
    assert world.reconcile().requeue_after == pytest.approx(60)
    world.forward(60)
    made = world.reconcile()
    assert [(d.resource, d.uid) for d in made.deletes] == [(names.DDPJOBS, UID)]


def test_a_finished_job_is_left_alone_by_later_edits() -> None:
    world = World(a_job(numNodes=1))
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(0, ended(0))
    world.settle()
    world.job["spec"]["suspend"] = True
    world.pods.clear()
    assert world.reconcile().idle


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    job = a_job()
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert World(job).reconcile().idle


def test_a_spec_that_cannot_be_parsed_is_explained_once() -> None:
    job = a_job(numNodes=0)
    world = World(job)
    made = world.reconcile()
    assert world.status["state"] == "Invalid"
    assert "spec.numNodes" in world.condition("Stalled")["message"]
    assert [note.type for note in made.events] == ["Warning"]
    assert world.reconcile().idle


def test_a_changed_template_holds_restarts_until_it_is_undone() -> None:
    world = World(a_job(template={"spec": {"containers": [{"name": "trainer", "tty": False}]}}))
    world.settle()
    world.run_all()
    world.settle()
    world.job["spec"]["template"]["spec"]["containers"][0]["tty"] = True
    world.set_pod(0, ended(1))
    world.settle()
    assert world.status["attempt"] == 1
    assert world.condition("Stalled")["reason"] == "SpecChanged"
    world.job["spec"]["template"]["spec"]["containers"][0]["tty"] = False
    world.settle()
    assert world.status["attempt"] == 2


def test_a_refused_create_is_shown_with_the_servers_words() -> None:
    world = World(a_job())
    world.reconcile()
    world.pods.clear()
    problem = Problem("CreateRefused", names.PODS, "mnist-0a1b2-1-0", "exceeded quota: pods=1")
    observed = observe(world.job, [], service=world.service, problems=[problem])
    made = plan(world.job, observed, NOW, SETTINGS)
    assert made.status is not None
    condition = next(c for c in made.status["conditions"] if c["type"] == "Running")
    assert (condition["reason"], condition["message"]) == ("CreateRefused", "exceeded quota: pods=1")
    assert made.creates, "it is tried again"


def test_a_name_conflict_is_shown_as_stalled() -> None:
    world = World(a_job())
    world.reconcile()
    problem = Problem("NameConflict", names.PODS, "mnist-0a1b2-1-0", "pod mnist-0a1b2-1-0 belongs to somebody else")
    made = plan(world.job, observe(world.job, [], problems=[problem]), NOW, SETTINGS)
    assert made.status is not None
    stalled = next(c for c in made.status["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NameConflict")


@pytest.mark.parametrize(
    ("status", "condition", "reason", "words"),
    [
        (
            {"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3: no gpu"}]},
            "Scheduled", "Unschedulable", "0/3: no gpu",
        ),
        (
            {"phase": "Pending", "containerStatuses": [
                {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "Running", "ImagePullBackOff", "no such image",
        ),
    ],
)  # fmt: skip
def test_what_keeps_a_pod_from_running_is_quoted(status: dict, condition: str, reason: str, words: str) -> None:  # type: ignore[type-arg]
    world = World(a_job())
    world.settle()
    world.pod(1)["status"] = status
    made = world.reconcile()
    assert world.condition(condition)["reason"] == reason
    assert words in world.condition(condition)["message"]
    assert reason in [note.reason for note in made.events]
    assert world.reconcile().idle


def test_the_culprit_is_blamed_before_the_peers_it_took_along() -> None:
    world = World(a_job(numNodes=3))
    world.settle()
    world.run_all()
    world.settle()
    peer = json.dumps({"schema": 1, "cause": "peer", "code": 77, "message": "connection closed"})
    own = json.dumps({"schema": 1, "cause": "own", "rank": 2, "exception": "ValueError", "message": "bad", "step": 7})
    world.set_pod(0, ended(77, message=peer, at=NOW - timedelta(seconds=1)))
    world.set_pod(2, ended(1, message=own))
    world.settle()
    failure = world.status["failures"][0]
    assert (failure["rank"], failure["reason"]) == (2, "ValueError")
    assert "step 7" in failure["message"]


def test_a_zero_after_the_pod_was_asked_to_go_is_no_success() -> None:
    world = World(a_job(numNodes=1))
    world.settle()
    world.run_all()
    world.settle()
    pod = world.set_pod(0, ended(0, at=NOW + timedelta(seconds=5)))
    pod["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
    world.settle()
    assert world.status["attempt"] == 2


def test_progress_of_rank_zero_is_folded_in_and_a_late_answer_of_an_old_attempt_is_not() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    made = world.reconcile()
    assert world.reconcile().poll == ("mnist-0a1b2-1-0", "127.0.0.1", names.PROGRESS_PORT) and made.poll
    report = {"schema": 1, "seq": 4, "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 30, "totalSteps": 120,
              "loss": 0.25, "samplesPerSecond": 1234.5, "checkpoint": {"run": 1, "step": 20}}  # fmt: skip
    world.progress = (report, "mnist-0a1b2-1-0")
    world.settle()
    assert world.status["progress"]["display"] == "25% 30/120"
    assert world.status["progress"]["loss"] == "0.25"
    assert world.status["checkpoint"]["path"] == "run-000001/step-000000020.pt"
    world.set_pod(0, ended(1))
    world.settle()
    world.run_all()
    world.settle()
    world.progress = (report | {"step": 31}, "mnist-0a1b2-1-0")
    assert world.reconcile().idle


def test_the_last_progress_travels_in_the_termination_message() -> None:
    world = World(a_job(numNodes=1))
    world.settle()
    world.run_all()
    world.settle()
    message = json.dumps({
        "schema": 1, "outcome": "succeeded", "code": 0, "accuracy": 0.9912345,
        "progress": {"step": 470, "totalSteps": 470, "loss": 0.01}, "checkpoint": {"run": 1, "step": 470},
        "resumedFrom": {"run": 1, "step": 200},
    })  # fmt: skip
    world.set_pod(0, ended(0, message=message))
    made = world.reconcile()
    assert world.status["progress"]["accuracy"] == "0.991235"
    assert world.status["progress"]["percent"] == 100
    assert world.status["checkpoint"]["resumedFromStep"] == 200
    assert "ResumedFromCheckpoint" in [note.reason for note in made.events]


@pytest.mark.parametrize("message", ["", "Traceback ...", "{", "[1]", '{"progress": 3}', '{"progress": {"step": "x"}}'])
def test_a_trainer_that_speaks_no_json_still_succeeds(message: str) -> None:
    world = World(a_job(numNodes=1))
    world.settle()
    world.run_all()
    world.settle()
    world.set_pod(0, ended(0, message=message))
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_a_sidecar_does_not_keep_a_finished_job_alive() -> None:
    world = World(a_job(numNodes=1))
    world.settle()
    world.run_all()
    world.settle()
    status = ended(0) | {"phase": "Running"}
    status["containerStatuses"].append({"name": "side", "state": {"running": {}}})
    world.set_pod(0, status)
    world.settle()
    assert world.status["state"] == "Succeeded" and not world.pods


def test_running_again_after_status_was_wiped_does_not_meet_old_names() -> None:
    world = World(a_job())
    world.settle()
    world.run_all()
    world.settle()
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 2
    assert world.attempts() == ["2"]
    assert running()["phase"] == "Running"
