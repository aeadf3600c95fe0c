"""Kueue: a job that may not start, leaves its queue or ends gives its quota back when no pod uses it."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob.engine.scheduling.kueue import WAITING
from tests.builders import ended, failed
from tests.engine.queued import NAME, Queued, started


def test_suspension_deactivates_the_workload_and_resume_activates_it() -> None:
    world = started()
    world.suspend(True)
    assert world.workload["spec"]["active"] is False and world.status["state"] == "Suspended"
    world.evicted("Deactivated", "The workload is deactivated")
    assert world.conditions()["QuotaReserved"][0] == "False"
    world.edit(suspend=False, numNodes=3)
    assert world.workload["spec"]["active"] is True and world.workload["spec"]["podSets"][0]["count"] == 3
    assert world.condition("Running")["reason"] == WAITING
    world.admitted()
    assert len([pod for pod in world.pods if "-2-" in pod]) == 3


def test_a_new_size_is_not_started_on_the_old_quota_after_a_failure() -> None:
    """A pod fails while another operator sees the job neither suspended nor resumed."""
    world = started()
    world.job["spec"]["numNodes"] = 4
    world.job["metadata"]["generation"] += 1
    world.fail(1)
    assert world.workload["spec"]["active"] is False and not world.pods_in_use()
    world.evicted("Deactivated")
    assert world.workload["spec"]["active"] is True and world.workload["spec"]["podSets"][0]["count"] == 4
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods_in_use()) == 4


def test_what_a_person_activated_and_an_administrator_deactivates_later_stays_so() -> None:
    world = Queued(template={"spec": {"nodeSelector": {"gpu": "a100"}}})
    world.settle()
    world.admits()
    world.gives_back()
    world.found[names.FLAVORS, "h100"] = {"spec": {"nodeLabels": {"gpu": "a100"}}}
    world.workload["spec"]["active"] = True
    world.admitted()
    world.run_all_and_settle()
    assert world.status["state"] == "Running"
    world.workload["spec"]["active"] = False
    world.evicted("Deactivated", "The workload is deactivated")
    assert world.workload["spec"]["active"] is False and not world.pods_in_use()
    assert world.condition("Running")["reason"] == "QueueDeactivated"


def test_a_workload_that_an_administrator_deactivated_holds_the_job_until_it_is_activated() -> None:
    world = started()
    world.workload["spec"]["active"] = False
    world.evicted("Deactivated", "The workload is deactivated")
    found = world.condition("Running")
    assert found["reason"] == "QueueDeactivated" and f"to run kubectl patch workload {NAME}" in found["message"]
    world.suspend(True)
    world.suspend(False)
    assert world.workload["spec"]["active"] is False, "resume does not overrule the administrator"
    world.workload["spec"]["active"] = True
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods) == 2


def test_end_of_the_job_releases_the_quota_when_all_pods_stopped() -> None:
    world = started(podRetention="All")
    sidecar = {"name": "sidecar", "state": {"running": {}}}
    for rank in range(2):
        pod = world.set_pod(rank, ended(0))
        pod["status"] |= {"phase": "Running", "containerStatuses": [*pod["status"]["containerStatuses"], sidecar]}
    world.reconcile()
    assert world.status["state"] == "Succeeded" and "Finished" not in world.conditions()
    world.settle()
    assert world.conditions()["Finished"] == ("True", "Succeeded")


def test_a_queue_that_no_local_queue_can_be_holds_the_job_until_the_label_is_corrected() -> None:
    world = Queued()
    world.label({})
    world.run_all_and_settle()
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "Research_A"}
    world.workload_answers = False
    assert world.settle() == 1 and world.reconcile().requeue_after == LOOKUP_SECONDS
    world.workload_answers = True
    world.settle()
    assert not world.pods and not world.groups.get(names.WORKLOADS) and world.status["state"] == "Queued"
    assert "correct the label" in world.condition("Running")["message"]
    world.label({names.LABEL_QUEUE: "research"})
    world.label({names.LABEL_QUEUE: "Research_A"})
    assert world.workload["spec"]["active"] is False and world.workload["spec"]["queueName"] == "research"
    assert world.settle() == 0
    assert "correct the label" in world.condition("Running")["message"]
    world.label({names.LABEL_QUEUE: "research"})
    assert world.workload["spec"] == world.workload["spec"] | {"queueName": "research", "active": True}
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods) == 2


def test_a_queue_that_no_local_queue_can_be_takes_no_quota_away() -> None:
    """As any other label, it applies when no quota is reserved. What came too late after a deactivation goes back."""
    world = Queued()
    world.settle()
    world.admits()
    world.says("Admitted", "False", "NoChecks")
    world.label({names.LABEL_QUEUE: "Research_A"})
    assert "quota is reserved" in world.condition("Running")["message"] and world.workload["spec"]["active"] is True
    world.admitted()
    world.set_pod(0, failed())
    world.settle_after_backoff()
    assert world.status["attempt"] == 2 and len(world.pods_in_use()) == 2
    world.lingering = True
    world.evicted()
    world.lingering = False
    world.stops_pods()
    (change,) = (each for each in world.reconcile().changes if each.resource is names.WORKLOADS)
    assert change.value == {"active": False}, "or Kueue admits it again as soon as the quota is free"
    world.gives_back()
    world.admits()  # Kueue had not seen the deactivation
    world.gives_back()
    assert world.status["attempt"] == 2
    assert not any(change.value == {"active": True} for made in world.plans for change in made.changes)


def test_a_job_that_leaves_its_queue_gives_the_quota_back_after_its_attempt() -> None:
    world = started()
    world.label({})
    assert world.workload["spec"]["active"] is False and world.status["state"] == "Running"
    world.evicts("Deactivated")
    assert world.settle() == 0 and world.conditions()["QuotaReserved"][0] == "True"
    world.show_all(ended(0))
    assert world.status["state"] == "Succeeded" and world.conditions()["Finished"][0] == "True"


def test_quota_of_a_job_that_left_its_queue_is_released_although_the_next_attempt_starts_at_once() -> None:
    world = started()
    world.label({})
    world.evicts("Deactivated")
    world.lingering, world.round = True, None  # the operator is another process from here on
    world.fail(1)
    assert world.status["attempt"] == 2 and world.conditions()["QuotaReserved"][0] == "True", "pod 0 still saves"
    world.stops_pods()
    world.settle()
    assert "admission" not in world.workload["status"] and world.conditions()["QuotaReserved"][0] == "False"
    assert len([pod for pod in world.pods if "-2-" in pod]) == 2


def test_quota_of_a_job_that_left_its_queue_while_a_deactivation_ended_its_attempt_is_released() -> None:
    world = started()
    world.lingering = True
    world.workload["spec"]["active"] = False
    world.evicted("Deactivated", "exceeded the maximum number of re-queuing retries")
    assert world.status["currentAttempt"]["ending"]["verdict"] == "EvictedFromQueue" and world.pods_in_use()
    del world.job["metadata"]["labels"][names.LABEL_QUEUE]
    world.settle()
    world.stops_pods()
    world.lingering = False
    world.settle()
    world.run_all_and_settle()
    assert world.status["attempt"] == 2 and world.status["state"] == "Running"
    assert world.conditions()["QuotaReserved"][0] == "False"


def test_a_job_with_a_changed_template_gives_its_quota_back_until_the_change_is_undone() -> None:
    world = started(template={"spec": {"dnsPolicy": "None"}})
    world.edit(template={"spec": {"dnsPolicy": "Default"}})
    assert world.workload["spec"]["active"] is True and len(world.pods_in_use()) == 2, "the attempt goes on"
    world.set_pod(1, failed(1))
    world.gives_back()
    assert world.condition("Stalled")["reason"] == "SpecChanged"
    world.edit(template={"spec": {"dnsPolicy": "None"}})
    assert world.workload["spec"]["active"] is True and world.condition("Running")["reason"] == WAITING
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods_in_use()) == 2


def test_a_job_with_a_refused_template_gives_its_quota_back_when_no_pod_runs() -> None:
    world = started(template={"spec": {"volumes": []}})
    world.edit(template={"spec": {"volumes": {"a": 1}}})
    assert world.status["state"] == "Invalid" and world.workload["spec"]["active"] is True
    world.evicted()
    assert len(world.pods_in_use()) == 2 and world.conditions()["QuotaReserved"][0] == "True"
    for rank in range(2):
        world.set_pod(rank, ended(0))
    world.gives_back()
    world.edit(template={"spec": {"volumes": []}})
    assert world.status["state"] == "Succeeded"


@pytest.mark.parametrize("change", ["queue", "suspend"])
def test_a_job_whose_admission_contradicts_its_template_leaves_the_queue_until_something_changes(change: str) -> None:
    world = Queued(template={"spec": {"nodeSelector": {"gpu": "a100"}}})
    world.settle()
    world.admits()
    world.gives_back()
    running = world.condition("Running")
    assert running["reason"] == "QueueUnavailable" and "nodeSelector gpu=h100" in running["message"]
    if change == "queue":
        world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "other"}
    else:
        world.edit(suspend=True)
        world.edit(suspend=False)
    world.settle()
    assert world.workload["spec"]["active"] is True and world.condition("Running")["reason"] == WAITING
    assert names.ANNOTATION_HELD not in world.workload["metadata"]["annotations"]
    world.admitted()
    assert not world.pods


@pytest.mark.parametrize("text", ["", "%s: ", '{"edition": "%s"}', "%s: " + "f" * 100_000, 7])
def test_whatever_someone_writes_into_a_hold_the_message_stays_short(text: Any) -> None:
    world = Queued(template={"spec": {"nodeSelector": {"gpu": "a100"}}})
    world.settle()
    world.admits()
    world.gives_back()
    annotations = world.workload["metadata"]["annotations"]
    edition = annotations[names.ANNOTATION_HELD].partition(": ")[0]
    annotations[names.ANNOTATION_HELD] = text.replace("%s", edition) if isinstance(text, str) else text
    world.settle()
    assert not world.pods and len(world.condition("Running")["message"]) < 1000


@pytest.mark.parametrize("end", ["evicted", "suspended"])
def test_pod_that_hangs_on_a_ready_node_and_keeps_the_quota_is_named(end: str) -> None:
    world = started()
    world.lingering = True
    if end == "suspended":
        world.suspend(True)
    world.evicted()
    shown = "Suspended" if end == "suspended" else "Running"
    assert "keeps the quota" not in world.condition(shown)["message"], "it may still save"
    del world.pods[world.pod(0)["metadata"]["name"]]
    hung = world.pod(1)["metadata"]
    made = world.reconcile()
    assert made.requeue_after is not None and made.requeue_after <= 35
    world.later(36)
    message = world.condition(shown)["message"]
    for part in (
        f"pod {hung['name']} on Kubernetes node worker",
        hung["deletionTimestamp"],
        "keeps the quota",
        "--force",
    ):
        assert part in message
    assert world.settle() == 0 and world.conditions()["QuotaReserved"][0] == "True"
    del world.pods[hung["name"]]
    world.settle()
    assert "keeps the quota" not in world.condition(shown)["message"]
    assert world.conditions()["QuotaReserved"][0] == "False"
