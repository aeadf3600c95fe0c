"""Kueue: a job in a queue starts when its Workload is admitted, and gives its quota back after an eviction."""

from datetime import timedelta

import pytest

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import LOOKUP_SECONDS, EngineSettings, Problem
from ddpjob.engine.observed import Unknown
from ddpjob.engine.scheduling.kueue import WAITING
from tests.builders import UID, a_job, a_started_world, failed, running
from tests.engine.queued import FLAVOR, NAME, Queued, started

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
}


def test_workload_of_scheduling_fields_is_created_and_the_job_waits_for_its_admission() -> None:
    requests = {"requests": {"nvidia.com/gpu": "8"}}
    template = {"spec": {"nodeSelector": {"zone": "a"}, "containers": [{"name": "trainer", "env": []}]}}
    world = Queued(resources=requests, template=template, command=["train"])
    world.settle()
    assert not world.pods and world.status["state"] == "Queued"
    spec, meta = world.workload["spec"], world.workload["metadata"]
    assert (spec["queueName"], spec["priority"], spec["active"]) == ("research", 0, True)
    (pods,) = spec["podSets"]
    assert (pods["name"], pods["count"]) == ("main", 2)
    assert pods["template"]["spec"]["nodeSelector"] == {"zone": "a"}
    assert pods["template"]["spec"]["containers"] == [{"name": "trainer", "resources": requests}]
    assert meta["labels"]["kueue.x-k8s.io/job-uid"] == UID and meta["ownerReferences"][0]["controller"]
    assert "finalizers" not in meta
    world.says("QuotaReserved", "False", "Pending", "insufficient unused quota for nvidia.com/gpu, 4 more needed")
    world.settle()
    for name in ("Running", "Scheduled"):
        assert world.condition(name)["reason"] == WAITING and "4 more needed" in world.condition(name)["message"]


def test_admission_starts_the_pods_with_flavors_and_updates_of_checks_and_their_group() -> None:
    world = Queued()
    world.settings = EngineSettings(kueue=True, gang_scheduler="volcano")
    world.settle()
    assert [*world.groups] == [names.WORKLOADS]
    update = {"name": "main", "annotations": {"note": "x"}, "labels": {"l": "y"}, "nodeSelector": {"rack": "7"}}
    world.admitted(admissionChecks=[{"name": "capacity", "state": "Ready", "podSetUpdates": [update]}])
    pod = world.pod(1)
    assert len(world.pods) == 2 and pod["spec"]["nodeSelector"] == {"gpu": "h100", "rack": "7"}
    assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
    assert pod["metadata"]["labels"]["l"] == "y" and pod["metadata"]["annotations"]["note"] == "x"
    assert pod["metadata"]["labels"][names.LABEL_NODE_RANK] == "1"
    assert len(world.groups[names.VOLCANO_GROUPS]) == 1 and pod["spec"]["schedulerName"] == "volcano"


def test_quota_without_its_admission_checks_is_no_admission() -> None:
    world = Queued()
    world.settle()
    world.says("QuotaReserved", "True", "QuotaReserved")
    check = {"name": "capacity", "state": "Pending", "message": "provisioning"}
    world.workload["status"] |= {"admissionChecks": [check]}
    world.settle()
    assert not world.pods and "capacity: Pending provisioning" in world.condition("Running")["message"]


def test_priority_is_that_of_the_class_in_the_label_and_else_that_of_the_pods() -> None:
    labels = {names.LABEL_QUEUE_PRIORITY: "high"}
    world = Queued(labels=labels, template={"spec": {"priorityClassName": "pods"}})
    world.settle()
    assert names.WORKLOADS not in world.groups and "WorkloadPriorityClass high" in world.condition("Running")["message"]
    world.found[names.WORKLOAD_PRIORITIES, "high"] = {"value": 1000}
    world.settle()
    kind = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert (world.workload["spec"]["priority"], world.workload["spec"]["priorityClassRef"]) == (1000, kind)
    other = Queued(template={"spec": {"priorityClassName": "pods"}})
    other.found[names.POD_PRIORITIES, "pods"] = {"value": 7}
    other.settle()
    spec = other.workload["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["kind"]) == (7, "PriorityClass")


def test_restart_leaves_the_admission_and_says_that_the_pods_recovered() -> None:
    world = started()
    assert world.conditions()["PodsReady"] == ("True", "Started")
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["attempt"] == 2 and world.conditions()["PodsReady"] == ("False", "WaitForRecovery")
    assert world.conditions()["Admitted"][0] == "True" and world.pod(0)["spec"]["nodeSelector"] == {"gpu": "h100"}
    world.run_all_and_settle()
    assert world.conditions()["PodsReady"] == ("True", "Recovered")
    writes = [change for made in world.plans for change in made.changes if change.resource is names.WORKLOADS]
    assert all([*change.value] == ["conditions"] for change in writes) and len(writes) == 3


def test_eviction_ends_the_attempt_uncounted_and_quota_is_released_when_all_pods_stopped() -> None:
    world = started()
    world.lingering = True
    world.evicted()
    assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods.values())
    assert world.status["currentAttempt"]["ending"]["verdict"] == "EvictedFromQueue"
    assert world.conditions()["QuotaReserved"][0] == "True", "the pods still use it"
    world.stops_pods()
    world.settle()
    found = world.conditions()
    assert "admission" not in world.workload["status"]
    assert (found["QuotaReserved"], found["Admitted"]) == (("False", "Pending"), ("False", "NoReservation"))
    assert (found["Requeued"], found["PodsReady"]) == (("True", "Preempted"), ("False", "WaitForStart"))
    assert found["Evicted"] == ("True", "Preempted"), "Kueue's own"
    assert world.status["state"] == "Queued" and world.status["restarts"] == 0
    world.forward(3600)
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods) == 2
    assert world.status["time"]["queued"] >= 3600 and world.status["restartsCountedTowardsLimit"] == 0


@pytest.mark.parametrize("failed_before", [False, True])
def test_no_deadline_passes_while_a_job_waits_that_lost_its_quota(failed_before: bool) -> None:
    world = started(activeDeadlineSeconds=600)
    world.forward(100)
    if failed_before:
        world.set_pod(1, failed(1))
    world.evicted()
    world.later(3600)
    assert (world.status["state"], world.status["activeSeconds"]) == ("Queued", 100)
    world.admitted()
    assert world.status["attempt"] == 2
    assert world.status["time"]["queued"] == 3600 and world.status["restarts"] == int(failed_before)


@pytest.mark.parametrize("reason", ["PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped", "Deactivated"])
def test_kueue_decides_when_a_job_is_queued_again_that_was_not_preempted(reason: str) -> None:
    world = started()
    world.evicted(reason)
    assert world.conditions()["Requeued"] == ("False", reason)


def test_an_eviction_between_attempts_leaves_the_delay_before_the_next_one() -> None:
    world = started()
    for _ in range(3):
        world.fail(1)
        if world.status["currentAttempt"]["phase"] == "Ending":
            break
        world.run_all_and_settle()
    until = world.status["currentAttempt"]["ending"]["until"]
    world.evicted()
    ending = world.status["currentAttempt"]["ending"]
    assert ending["until"] == until is not None and ending["verdict"] == "EvictedFromQueue"
    world.admitted()
    number = world.status["attempt"]
    world.later(61)
    assert world.status["attempt"] == number + 1


def test_no_deadline_passes_while_a_job_waits_for_a_kueue_that_was_removed() -> None:
    world = started(activeDeadlineSeconds=3600)
    world.served = frozenset()
    world.fail(1)
    world.later(4000)
    assert world.condition("Running")["reason"] == "QueueUnavailable"
    world.served = None
    world.settle()
    assert world.status["attempt"] == 2


@pytest.mark.parametrize("kueue", [False, True], ids=["not enabled", "not installed"])
def test_queue_without_kueue_holds_the_job_and_starts_it_later(kueue: bool) -> None:
    world = Queued(kueue=kueue)
    world.served = frozenset()
    world.settle()
    assert not world.pods and not world.groups and world.status["state"] == "Queued"
    assert world.condition("Running")["reason"] == "QueueUnavailable"
    world.settings, world.served = EngineSettings(kueue=True), frozenset({names.WORKLOADS.api_version})
    world.settle()
    world.admitted()
    assert len(world.pods) == 2


def test_a_job_without_a_queue_needs_no_kueue_and_this_machine_has_none() -> None:
    world = Queued()
    world.label({})
    assert len(world.pods) == 2 and not world.groups
    here = Queued(kueue=None)
    here.settle()
    assert len(here.pods) == 2 and not here.groups


def test_kueue_that_is_removed_touches_no_running_pod() -> None:
    world = started()
    world.served = frozenset()
    world.groups.clear()
    assert world.settle() == 0 and world.status["state"] == "Running"


def test_a_workload_that_a_user_deleted_is_created_again_and_the_attempt_waits_for_it() -> None:
    world = started()
    world.groups.clear()
    world.reconcile()
    assert len(world.pods) == 2 and world.workload["spec"]["queueName"] == "research"
    world.settle()
    assert not world.pods and world.status["state"] == "Queued" and world.status["restarts"] == 0


@pytest.mark.parametrize("was_queued", [True, False])
def test_a_running_job_that_its_queue_can_never_admit_saves_and_waits(was_queued: bool) -> None:
    """Its Workload was deleted, or it got a queue while it ran, and the class of its priority does not exist."""
    world = Queued()
    world.settings = EngineSettings(kueue=was_queued)
    world.label({names.LABEL_QUEUE: "research"} if was_queued else {})
    if was_queued:
        world.admitted()
    world.run_all_and_settle()
    world.settings = EngineSettings(kueue=True)
    world.groups.clear()
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "research", names.LABEL_QUEUE_PRIORITY: "high"}
    wanted = names.WORKLOAD_PRIORITIES, "high"
    world.found[wanted] = Unknown("no answer", is_final=False)
    assert world.settle() == 1 and world.status["state"] == "Running", "one failed read says nothing"
    assert world.plans[-2].events[0].reason == "QueueUnavailable"
    assert world.reconcile().requeue_after == LOOKUP_SECONDS
    world.found[wanted] = Unknown("not found")
    world.workload_answers = False
    assert world.settle() == 1 and world.status["state"] == "Running", "there may be a Workload"
    assert world.reconcile().requeue_after == LOOKUP_SECONDS
    shown = world.condition("Running")
    assert (shown["status"], shown["reason"]) == ("True", "QueueUnavailable") and "without quota" in shown["message"]
    world.workload_answers = True
    world.settle()
    assert not world.pods and (world.status["state"], world.status["restarts"]) == ("Queued", 0)
    shown = world.condition("Running")
    assert shown["reason"] == "QueueUnavailable" and "WorkloadPriorityClass high" in shown["message"]
    assert f"or change {names.LABEL_QUEUE_PRIORITY}" in shown["message"]
    world.found[wanted] = {"value": 7}
    world.settle()
    world.admitted()
    assert world.status["attempt"] == 2 and len(world.pods) == 2


@pytest.mark.parametrize("reason", ["CreateFailed", "NameTerminating"])
def test_a_running_job_whose_workload_cannot_be_created_shows_it_beside_other_problems(reason: str) -> None:
    world = Queued(kueue=None)
    world.settle()
    world.run_all_and_settle()
    world.settings, world.progress_problem = EngineSettings(kueue=True), "unreachable"
    world.job["spec"]["progressDeadlineSeconds"] = 600
    world.problems = problems = (Problem(reason, names.WORKLOADS, NAME, "failed calling webhook"),)
    world.forward(61)
    world.reconcile(crash_after=1)
    shown = world.condition("Running")
    assert (shown["status"], shown["reason"]) == ("True", "ProgressUnknown")
    assert "without quota: failed calling webhook" in shown["message"]
    world.progress_problem, world.problems = None, problems
    world.reconcile(crash_after=1)
    assert world.condition("Running")["reason"] == "QueueUnavailable" and world.status["state"] == "Running"


def test_a_workload_of_another_owner_is_left_alone_and_named() -> None:
    world = Queued()
    world.problems = (Problem("NameConflict", names.WORKLOADS, NAME, f"Workload {NAME} exists"),)
    world.reconcile(crash_after=1)
    assert world.condition("Running")["reason"] == "NameConflict" and world.condition("Stalled")["status"] == "True"
    assert world.status["state"] == "Queued"


def test_another_queue_is_entered_when_no_quota_is_reserved() -> None:
    world = Queued()
    world.settle()
    world.label({names.LABEL_QUEUE: "urgent"})
    assert world.workload["spec"]["queueName"] == "urgent"
    world.starts()
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "research"}
    assert world.settle() == 0 and world.workload["spec"]["queueName"] == "urgent"


@pytest.mark.parametrize("crash_after", range(1, 4))
@pytest.mark.parametrize("moment", ["create", "admit", "evict"])
def test_crash_between_any_two_writes_changes_nothing(moment: str, crash_after: int) -> None:
    world = Queued()
    if moment == "create":
        world.reconcile(crash_after=crash_after)
    world.settle()
    world.admits()
    if moment == "admit":
        world.reconcile(crash_after=crash_after)
    world.settle()
    world.run_all_and_settle()
    world.evicts()
    if moment == "evict":
        world.reconcile(crash_after=crash_after)
    world.settle()
    assert not world.pods and world.conditions()["QuotaReserved"] == ("False", "Pending")
    world.admitted()
    assert len(world.pods) == 2 and world.status["attempt"] == 2 and len(world.groups[names.WORKLOADS]) == 1


def test_a_status_is_written_only_to_the_workload_that_the_plan_has_seen() -> None:
    world = started()
    (change,) = [c for made in world.plans for c in made.changes]
    assert change.part == "status" and change.body["metadata"]["resourceVersion"] == change.version != ""
    types = [each["type"] for each in change.value["conditions"]]
    assert sorted(types) == ["Admitted", "Evicted", "PodsReady", "QuotaReserved"], "the patch replaces the list"


def test_digest_of_another_release_takes_no_quota_away() -> None:
    world = started()
    world.workload["metadata"]["annotations"][names.ANNOTATION_POD_SETS] = "v0:other"
    for number in (2, 3):  # the second restart has a delay, in which no pod runs
        world.set_pod(1, failed(1))
        world.settle_after_backoff()
        assert world.status["attempt"] == number and world.workload["spec"]["active"] is True
        world.run_all_and_settle()
    assert world.conditions()["Admitted"][0] == "True"


def test_a_flavor_that_cannot_be_read_is_read_again_before_a_pod_that_stops_has_ended() -> None:
    world = started()
    world.lingering = True
    world.found[names.FLAVORS, "h100"] = Unknown("no answer", is_final=False)
    world.fail(1)
    assert world.status["state"] == "Queued" and world.pods_in_use()
    for pod in world.pods.values():
        pod["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=300))
    assert world.reconcile().requeue_after == LOOKUP_SECONDS


@pytest.mark.parametrize("is_final", [False, True])
def test_a_flavor_that_is_not_known_keeps_the_job_from_starting_and_takes_no_quota(is_final: bool) -> None:
    unknown = Unknown("no flavor", is_final=is_final)
    world = Queued()
    world.settle()
    world.found[names.FLAVORS, "h100"] = unknown
    world.admitted()
    found = world.condition("Running")
    assert not world.pods and found["reason"] == "QueueUnavailable" and "no flavor" in found["message"]
    assert world.workload["spec"]["active"] is True and world.conditions()["QuotaReserved"][0] == "True"
    assert world.reconcile().requeue_after == LOOKUP_SECONDS
    world.found[names.FLAVORS, "h100"] = FLAVOR
    world.settle()
    world.run_all()
    world.found[names.FLAVORS, "h100"] = unknown
    world.settle()
    assert world.condition("Running")["reason"] == "AllNodesRunning", "it has quota"


def test_gate_of_pods_that_kueue_manages_by_itself_is_named() -> None:
    world = a_started_world(a_job())
    world.pod(0)["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    world.settle()
    scheduled = world.condition("Scheduled")
    assert scheduled["reason"] == "AdmissionGated" and "externalFrameworks" in scheduled["message"]


def test_a_smaller_attempt_leaves_the_workload_of_all_nodes_as_it_is() -> None:
    """Kueue refuses other podSets while quota is reserved, and the job is to grow into its quota again."""
    world = Queued(numNodes=3, minNodes=2)
    world.settle()
    world.admitted()
    spec = dict(world.workload["spec"])
    for rank in (0, 1):
        world.set_pod(rank, running(), node=f"worker-{rank}")
    world.pod(2)["status"] = UNSCHEDULABLE
    world.settle()
    world.forward(301)  # partialGangSeconds
    world.settle()
    for rank in (0, 1):
        world.set_pod(rank, running(), node=f"worker-{rank}")
    world.settle()
    assert world.status["nodesReady"] == "2/2 of 3" and world.status["restarts"] == 0
    assert world.conditions()["PodsReady"][0] == "True", "Kueue evicts a job whose pods are not ready in time"
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["attempt"] == 3 and len([name for name in world.pods if "-3-" in name]) == 2
    assert world.workload["spec"] == spec and spec["podSets"][0]["count"] == 3
    changes = [change for made in world.plans for change in made.changes if change.resource is names.WORKLOADS]
    assert {change.part for change in changes} == {"status"}
    assert all([*change.value] == ["conditions"] for change in changes), "no admission is cleared"
    world.evicted()
    assert world.conditions()["QuotaReserved"][0] == "False" and world.workload["spec"] == spec
    world.settle_after_backoff()
    world.admitted()
    assert len([name for name in world.pods if "-4-" in name]) == 3, "it waited for the quota of all nodes"
    assert "reclaimablePods" not in world.workload["status"], "Kueue lets no job take them back without an eviction"
