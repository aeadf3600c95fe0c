"""The verdict on a job in each of its stages, from recorded objects."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.failure import FailureFacts
from ddpjob.api.objects import Json
from ddpjob.api.status import recorded_status
from ddpjob.api.times import timestamp
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explain import explain, needed
from ddpjob.client.verdict.explanation import Explanation
from ddpjob.client.verdict.facts import Case
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.observed import Elder
from ddpjob.local import admission as local
from tests.builders import NOW, SETTINGS, World, a_job, a_running_world, ended, failed, running
from tests.client.situations import deployment, refuse, unschedulable, waits_for
from tests.engine.test_plain_scripts import VALUE_ERROR, log
from tests.engine.test_slow_nodes import NODES, TEN_MINUTES, place, slow_attempt, train, world_of
from tests.json_schema import faults
from tests.local.builders import OF_A_CLUSTER_ALONE

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "schemas" / "explanation.json").read_text(encoding="utf-8"))


def facts(world: World, **more: Any) -> Snapshot:
    given = {"job": world.job, "now": world.now, "settings": SETTINGS, "pods": list(world.pods.values())}
    return Snapshot(**given | more)


def why(world: World, **more: Any) -> Explanation:
    """Return the verdict, whose JSON fits the committed schema."""
    found = explain(facts(world, **more))
    assert not list(faults(json.loads(json.dumps(found.wire())), SCHEMA))
    return found


def why_here(world: World, *, is_run: bool = True) -> Explanation:
    """Return the verdict in local mode, which names nothing of a cluster."""
    found = explain(replace(facts(world, is_run=is_run), settings=local.SETTINGS))
    assert not OF_A_CLUSTER_ALONE.search(f"{found.sentence} {found.hint} {found.next}"), found
    return found


def pending(world: World, rank: int = 0, **status: Any) -> Json:
    """Let a pod wait, and the operator see it."""
    node = status.pop("node", None)
    pod = world.set_pod(rank, {"phase": "Pending"} | status, node=node)
    world.settle()
    return pod


def started(job: Json | None = None) -> World:
    world = World(job or a_job())
    world.settle()
    return world


def refused(message: str) -> World:
    """Return a job after the API server refused its pods."""
    world = World(a_job())
    refuse(world, message)
    return world


def test_a_message_of_the_scheduler_is_read_from_the_condition_where_pods_may_not_be_read() -> None:
    world = started()
    message = (
        "0/3 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, 2 Too many pods."
    )
    pod = pending(world, **unschedulable(message))
    found = why(world)
    assert (found.stage, found.pod, found.node_rank) == ("Placement", pod["metadata"]["name"], 0)
    quoted = found.evidence[0]
    assert (quoted.kind, quoted.field, quoted.value) == ("Pod", "status.conditions[PodScheduled].message", message)
    poorer = why(world, pods=None, unread={"pods": "pods could not be read: you may not read this"})
    assert (poorer.reason, poorer.hint, poorer.is_abnormal) == (found.reason, found.hint, True)
    assert poorer.confidence != "High" and poorer.unread == ["pods could not be read: you may not read this"]
    assert (poorer.evidence[0].kind, poorer.evidence[0].field) == ("DDPJob", "status.conditions[Running]")
    assert message in poorer.sentence


@pytest.mark.parametrize(("edit", "nodes"), [({"numNodes": 4}, 2), ({"numNodes": "all"}, 2), ({}, 2)])
def test_why_counts_the_nodes_of_the_attempt_as_the_engine_does(edit: Json, nodes: int) -> None:
    """Seen: 4 of a job that trains on 2 and whose spec was edited since. A spec that cannot be read has no number."""
    world = a_running_world(a_job())
    world.job["spec"] |= edit
    case = Case(facts(world))
    assert (case.num_nodes, case.missing_nodes) == (nodes, [])
    assert why(world, pods=None, unread={"pods": "-"}).stage == "FirstStep"


def test_affinity_is_quoted_with_the_selector_of_the_pod() -> None:
    """Seen on kind: a pod with a node selector ended `ddpjob why` with an AttributeError."""
    asked = {"nodeSelector": {"disk": "ssd"}, "affinity": {"nodeAffinity": {}}}
    world = started(a_job(template={"spec": asked}))
    pending(world, **unschedulable("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."))
    found = why(world)
    assert [(e.field, "disk" in e.value) for e in found.evidence[1:]] == [
        ("spec.nodeSelector", True),
        ("spec.affinity", False),
    ]


def test_the_refusal_of_the_attempt_before_is_shown_while_the_next_one_tries() -> None:
    world = refused("violates PodSecurity")
    assert why(world).stage == "Refused"
    world.forward(3)
    world.reconcile()
    world.pods.clear()  # none is created yet
    about = {"kind": "DDPJob", "name": "mnist"}
    assert ("DDPJob", "mnist") in needed(facts(world)).about
    event = {
        "involvedObject": about,
        "metadata": {},
        "reason": "CreateRefused",
        "message": "exceeded quota: team, pods=1",
    }
    found = why(world, events=[event])
    assert (found.stage, found.evidence[0].kind) == ("Quota", "Event")


def test_a_running_job_that_can_get_no_quota() -> None:
    world = started()
    world.run_all()
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "Research_A"}
    world.settings, world.workload_answers = EngineSettings(kueue=True), False
    world.settle()
    found = why(world)
    assert (found.stage, found.reason, found.is_abnormal) == ("Running", "QueueUnavailable", True)
    assert "without quota" in found.sentence and names.LABEL_QUEUE in found.sentence
    assert found.next == "what the message says"
    training(world, 10)
    world.forward(150)
    assert (why(world).stage, why(world).reason) == ("Hang", "NoHeartbeat")


def test_a_gang_with_too_few_nodes_before_and_after_it_gives_them_back() -> None:
    world = started()
    pending(world, 0, node="worker")
    pending(world, 1, **unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))
    world.forward(10)
    world.settle()
    found = why(world)
    assert (found.stage, found.reason, found.node_rank) == ("Placement", "PartiallyScheduled", 1)
    assert "Insufficient nvidia.com/gpu" in found.sentence and "numNodes" in found.next
    world.elder = Elder("default", "older", timestamp(NOW))
    world.forward(290)
    world.settle()
    found = why(world)
    assert (found.stage, found.reason, found.state) == ("Placement", "YieldedTo", "Queued")
    assert "job older" in found.sentence and found.until and found.hint and found.next


def test_the_text_that_logtail_omits_is_read_from_the_log() -> None:
    world = a_running_world(a_job(numNodes=1, logTail="Omit", restartPolicy={"maxRestarts": 0}))
    world.set_pod(0, ended(1, message=log(0, VALUE_ERROR)))
    world.settle()
    assert VALUE_ERROR not in str(world.status)
    pod = world.pod(0)["metadata"]["name"]
    assert needed(facts(world)).logs == (pod,)
    assert VALUE_ERROR in why(world, logs={pod: log(0, VALUE_ERROR)}).sentence


def test_a_job_that_waits_for_its_next_attempt() -> None:
    world = a_running_world(a_job(restartPolicy={"backoff": {"initialSeconds": 30}}))
    for _ in range(2):
        world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad", rank=1))
        world.settle()
        if world.status["currentAttempt"]["phase"] == "Ending":
            break
        world.run_all()
        world.settle()
    found = why(world)
    assert (found.stage, found.exception, found.rank) == ("WaitingForRetry", "ValueError", 1)
    assert found.until == world.status["currentAttempt"]["ending"]["until"] and found.until in found.sentence


def report(step: int, **more: Any) -> Json:
    return {"schema": 3, "phase": "train", "step": step, "totalSteps": 1000, "stepsPerSecond": 10.0} | more


def training(world: World, step: int, **more: Any) -> None:
    world.progress = (report(step, **more), world.pod(0)["metadata"]["name"])
    world.settle()


@pytest.mark.parametrize(
    "spec", [{"command": ["ddprun", "train.py"]}, {"command": ["torchrun", "a.py"], "launcher": "Injected"}]
)
def test_a_launcher_that_has_not_answered_is_not_taken_for_a_program_without_one(spec: Json) -> None:
    world = a_running_world(a_job(**spec))
    world.forward(40)
    assert "its launcher has not answered yet" in str(why(world).hint)


def test_a_hang_is_only_seen_while_an_operator_asks_for_reports() -> None:
    world = a_running_world(a_job())
    world.forward(40)
    assert "GET /progress" in str(why(world).hint)
    training(world, 2001, pause={"stepSeconds": 0.05}, ageSeconds=0.0)
    world.forward(45)
    assert "mnist has made no step for 45 s, 900 times the median step, since step 2001" in why(world).sentence
    world.forward(105)
    assert (why(world).stage, why(world).step) == ("Hang", 2001)
    assert why(world, operators=[deployment(0)]).stage == "OperatorDown", "no operator has asked for a report"


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_is_abnormal_while_the_job_runs_and_after_it(loss: str) -> None:
    world = a_running_world(a_job())
    training(world, 10, loss=0.5)
    assert not why(world).is_abnormal
    world.status["progress"]["loss"] = loss
    found = why(world)
    assert (found.stage, found.reason, found.is_abnormal) == ("Running", "LossNotFinite", True)
    assert f"its loss at step 10 is {loss}" in found.sentence and "diverged" in str(found.hint)
    world.forward(150)
    assert why(world).stage == "Hang", "which needs attention first"
    for rank in (0, 1):
        world.set_pod(rank, ended(0))
    world.settle()
    world.status["progress"]["loss"] = loss
    found = why(world)
    assert (found.stage, found.is_abnormal) == ("Succeeded", True) and f"its last loss is {loss}" in found.sentence


@pytest.mark.parametrize("suspend", [True, False])
def test_a_job_of_this_machine_that_was_stopped_after_a_failure_quotes_the_failure(*, suspend: bool) -> None:
    world = a_running_world(a_job())
    training(world, 10)
    world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad"))
    world.settle_after_backoff()
    world.job["spec"]["suspend"] = suspend
    world.settle()
    found = why(world, is_run=False)
    assert found.stage == ("Suspended" if suspend else "Interrupted")
    assert "ValueError: bad" in str(found.evidence[-1].value)


def test_a_job_that_no_operator_has_seen() -> None:
    world = World(a_job())
    world.job["metadata"]["creationTimestamp"] = timestamp(NOW)
    assert why(world).stage == "Starting"
    found = why(world, operators=[deployment(0)])
    assert (found.stage, found.operator, found.confidence) == ("OperatorDown", "Down", "High")
    assert found.evidence[0].name == "ddpjob-system/ddpjob-operator"
    world.forward(100)
    found = why(world, unread={"operator": "the Deployment of the operator could not be read: you may not read this"})
    assert (found.stage, found.reason, found.confidence, len(found.unread)) == ("OperatorDown", "NeverSeen", "Low", 1)
    found = why(world, operators=[deployment(1, "team-b"), deployment(0, "team-c,default")])
    assert (found.operator, found.evidence[0].value) == ("Down", "0 of 1 replicas")


def test_an_operator_that_is_down_is_named_beside_what_the_pods_show() -> None:
    world = a_running_world(a_job())
    down = [deployment(0)]
    assert why(world, operators=[deployment(1)]).operator == "Alive"
    found = why(world, operators=down)
    assert (found.stage, found.operator, found.is_abnormal) == ("OperatorDown", "Down", True)
    world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad", rank=1))
    found = why(world, operators=down)
    assert (found.stage, found.exception, found.operator) == ("Crash", "ValueError", "Down")
    assert "the operator is down" in found.sentence
    assert why(world).operator == "Unknown", "it has time to look"
    world.forward(100)
    found = why(world)
    assert (found.stage, found.operator) == ("Crash", "Down")
    assert found.evidence[-1].field.endswith("finishedAt")


@pytest.mark.parametrize("operators", [None, []])
def test_a_report_that_no_operator_renews_has_its_age_and_less_confidence(operators: list[Json] | None) -> None:
    """Seen: "step 147, High", 50 s after the operator was uninstalled."""
    world = a_running_world(a_job())
    training(world, 147, ageSeconds=0.0)
    found = why(world, operators=operators)
    assert (found.step, found.confidence, "report" in found.sentence) == (147, "High", False)
    world.forward(50)
    found = why(world, operators=operators)
    assert (found.stage, found.step, found.confidence, found.is_abnormal) == ("Running", 147, "Medium", False)
    assert found.sentence.endswith("the last report is 50 s old, and no operator is known to ask for the next one")
    found = why(world, operators=[deployment(1)])
    assert (found.confidence, "report" in found.sentence) == ("High", False), "it has no other values"
    assert why_here(world).confidence == "High"


def test_verdicts_on_a_job_of_this_machine() -> None:
    new, world = World(a_job()), a_running_world(a_job())
    new.job["metadata"]["creationTimestamp"] = timestamp(NOW)
    stages = [why_here(new).stage]
    new.forward(100)
    stages.append(why_here(new).stage)
    for quiet in (45, 150):
        training(world, 2000, pause={"stepSeconds": 0.05}, ageSeconds=0.0)
        world.forward(quiet)
        stages.append(why_here(world).stage)
    world.job["spec"]["suspend"] = True
    stages.append(why_here(world, is_run=False).stage)  # its process was killed before the ranks had ended
    world.settle()
    world.settle()
    stages.append(why_here(world, is_run=False).stage)
    assert stages == ["Starting", "OperatorDown", "Running", "Hang", "Interrupted", "Suspended"]


def test_a_delay_that_has_passed_is_overdue_unless_the_job_waits_for_its_user() -> None:
    world = a_running_world(a_job(restartPolicy={"backoff": {"initialSeconds": 30}}))
    world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad"))
    world.reconcile()
    if world.status["currentAttempt"]["phase"] != "Ending":  # the first restart has no delay
        world.run_all()
        world.settle()
        world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad"))
        world.reconcile()
    world.forward(30 + 100)
    found = why(world)
    assert (found.stage, found.evidence[0].field) == ("OperatorDown", "status.currentAttempt.ending.until")
    here = "the process that runs mnist has not acted on the job for some time, so nothing"
    assert why_here(world).sentence.startswith(here)
    world.job["spec"]["template"] = {"spec": {"nodeSelector": {"disk": "ssd"}}}
    world.job["metadata"]["generation"] = 2
    world.settle()
    world.forward(1000)
    found = why(world)
    assert (found.stage, found.reason, found.operator) == ("Refused", "SpecChanged", "Unknown")


def test_a_job_that_waits_for_pods_of_its_last_attempt() -> None:
    world = a_running_world(a_job(checkpoint={"claimName": "c"}))
    world.lingering = True
    world.set_pod(1, failed(1, kind="Error", message="bad"))
    world.settle()
    for pod in world.pods.values():
        if "deletionTimestamp" in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=600))
    world.forward(300)
    world.settle()
    found = why(world)
    assert (found.stage, found.operator) == ("WaitingForRetry", "Unknown"), "an operator that waits is not down"
    assert f"pod {world.pod(0)['metadata']['name']} of attempt 1 on Kubernetes node worker" in found.sentence


def test_an_unfinished_job_of_this_machine_that_nothing_runs() -> None:
    world = a_running_world(a_job())
    found = why(world, is_run=False)
    assert (found.stage, found.operator, found.next) == ("Interrupted", "Down", "ddpjob resume mnist")
    assert "may begin again" in str(found.hint)
    job = world.job | {
        "status": world.status | {"checkpoint": {"path": "run-1", "step": 10, "time": "2026-01-01T00:00:00Z"}}
    }
    assert "continues from its last checkpoint" in str(why(world, job=job, is_run=False).hint)


@pytest.mark.parametrize("status", [unschedulable("2 Insufficient cpu."), waits_for("ImagePullBackOff"), {}])
def test_an_attempt_that_starts_after_a_failure_quotes_it_in_each_stage(status: Json) -> None:
    world = a_running_world(a_job())
    del world.pods[world.pod(1)["metadata"]["name"]]
    world.settle()
    pending(world, **status)
    found = why(world)
    assert (found.attempt, world.status["failures"][0]["reason"]) == (2, "PodLost")
    assert (found.evidence[-1].field, found.evidence[-1].value) == (
        "status.failures[0].message",
        world.status["failures"][0]["message"],
    )


def test_of_a_large_job_only_the_pods_that_wait_are_needed() -> None:
    world = started(a_job(numNodes=3))
    for rank in (0, 1):
        world.set_pod(rank, running())
    pod = pending(world, 2, **unschedulable("0/3 nodes are available: 3 Insufficient cpu."))
    assert why(world, pods=[pod], only_waiting=True) == why(world)
    assert why(world).missing_nodes == [2]
    pod["status"] = {"phase": "Pending"}
    found = why(world, pods=[pod], only_waiting=True)
    assert (found.stage, found.reason, found.missing_nodes) == ("Rendezvous", "NodesMissing", [2])


def test_error_that_ends_the_job_is_judged_as_the_operator_will_judge_it() -> None:
    """A program that reports nothing and trained for less than an hour: the same error twice has one cause."""
    trace = 'Traceback (most recent call last):\n  File "/app/train.py", line 92, in <module>\nKeyError: 1\n'
    world = World(a_job(numNodes=1))
    world.settle()
    for attempt in (1, 2):
        world.run_all()
        world.settle()
        world.forward(1800)
        world.set_pod(0, ended(1, message=trace, at=world.now))
        if attempt == 1:
            world.settle_after_backoff()
    before = why(world)
    world.settle_after_backoff()
    assert before.reason == why(world).reason == "DeterministicError"


def test_each_fact_of_a_failure_arrives_in_the_status_and_in_why() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0, "maxTotalRestarts": 0}))
    reported = {"exception": "ValueError", "where": "train.py:9", "rank": 3, "step": 7, "hint": "bad", "next": "clean"}
    world.set_pod(1, failed(1, kind="ValueError", message="wrong", signal=6, **reported), node="worker-1")
    world.settle()
    world.forward(130)
    world.settle()
    (failure,) = recorded_status(world.status).failures or ()
    found = why(world)
    for name in FailureFacts.model_fields:
        assert getattr(failure, name) is not None, name
        assert getattr(found, name) == getattr(failure, name), name
    assert reported.items() <= {name: getattr(found, name) for name in FailureFacts.model_fields}.items()


def test_old_failures_do_not_hide_that_the_job_runs() -> None:
    world = a_running_world(a_job())
    training(world, 10)
    world.forward(5)
    world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad"))
    world.settle_after_backoff()
    world.run_all()
    world.settle()
    world.forward(200)
    assert (why(world).stage, why(world).reason) == ("FirstStep", "NotReported"), "the report is of attempt 1"
    assert why(world).hint is None, "the program reports"
    training(world, 10)
    world.forward(1)
    found = why(world)
    assert (found.stage, found.attempt) == ("Running", 2)
    assert found.evidence[-1].field == "status.failures[0].message"


def test_slow_rank_is_explained_by_what_earlier_attempts_show_of_its_node() -> None:
    plain = world_of(scheduling={})
    place(plain, *NODES)
    train(plain, 60, 5)
    assert "with scheduling.avoidSlowNodes" in (why(plain).hint or "")
    world = world_of()
    place(world, *NODES)
    train(world, 60, 5)
    found = why(world)
    assert (found.reason, found.rank, found.node_name) == ("TrainingSlow", 5, "c")
    assert "avoidSlowNodes" not in (found.hint or "")
    slow_attempt(world, *NODES)
    place(world, *NODES)
    train(world, 60, 1, "data")
    assert "attempt 1" not in why(world).sentence, "it says nothing about a rank that waits for data"
    train(world, TEN_MINUTES, 5)
    found = why(world)
    assert found.sentence.endswith("; the node was slow in attempt 1, too")
    assert "status.slowNodes" in {each.field for each in found.evidence}
    world.fail(0, 1)
    world.run_next_attempt()
    place(world, *NODES)
    train(world, 30, None)
    assert why(world).sentence.endswith("; it prefers other Kubernetes nodes than c, which was slow in attempts 1, 2")
    place(world, "a", "b", "e", "d")
    train(world, 60, 5)
    found = why(world)
    assert found.sentence.endswith("; it was slow on c, too") and "wherever it runs" in (found.hint or "")


def test_throttled_rank_is_explained_with_the_numbers_of_its_container() -> None:
    for resources, end in (({"limits": {"cpu": "1500m"}}, "it is 1500m"), ({}, "fewer workers of the DataLoader")):
        world = world_of(resources=resources)
        place(world, *NODES)
        slow = {"rank": 5, "part": "throttled", "seconds": 0.02, "stepSeconds": 0.05, "throttled": 0.4123}
        world.report({"schema": 3, "phase": "train", "step": 7, "slow": slow})
        found = why(world)
        assert "rank 5 (Kubernetes node c): throttled, for 0.412 s of each second" in found.sentence
        assert "spec.resources.limits.cpu" in (found.next or "") and (found.next or "").endswith(end)
        limits = [each.value for each in found.evidence if each.field.endswith("limits.cpu")]
        assert limits == [*resources.get("limits", {}).values()]
