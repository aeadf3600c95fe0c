"""Kueue: a job in a queue starts when its Workload is admitted, and gives its quota back after an eviction."""

import json
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import LOOKUP_SECONDS, EngineSettings, Problem
from ddpjob.engine.observed import Unknown
from ddpjob.engine.scheduling.kueue import WAITING
from tests.builders import UID, World, a_job, a_started_world, ended, failed, running

NAME = names.service_name("mnist", UID)
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
}
FLAVOR = {"spec": {"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}


class Queued(World):
    """A job with a queue, and a Kueue of few lines that the test calls."""

    def __init__(self, *, kueue: bool | None = True, labels: dict[str, str] | None = None, **spec: Any) -> None:
        super().__init__(a_job(**spec))
        self.job["metadata"]["labels"] = {names.LABEL_QUEUE: "research"} | (labels or {})
        self.settings = EngineSettings(kueue=kueue)
        self.found[names.FLAVORS, "h100"] = FLAVOR

    @property
    def workload(self) -> dict[str, Any]:
        return self.groups[names.WORKLOADS][NAME]

    def conditions(self) -> dict[str, tuple[str, str]]:
        found = self.workload["status"].get("conditions") or ()
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    def says(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Set a condition of the Workload, as Kueue does."""
        new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01"}
        old = [each for each in self.workload["status"].get("conditions") or () if each["type"] != kind]
        self.workload["status"] |= {"conditions": [*old, new]}
        self.workload["metadata"]["resourceVersion"] += "0"

    def admits(self, **status: Any) -> None:
        assigned = {"name": "main", "flavors": {"cpu": "h100"}}
        self.workload["status"] |= {"admission": {"clusterQueue": "all", "podSetAssignments": [assigned]}} | status
        self.says("Evicted", "False", "QuotaReserved")
        self.says("QuotaReserved", "True", "QuotaReserved")
        self.says("Admitted", "True", "Admitted")

    def evicts(self, reason: str = "Preempted", message: str = "Preempted to accommodate a workload") -> None:
        self.says("Evicted", "True", reason, message)

    def admitted(self, **status: Any) -> None:
        self.admits(**status)
        self.settle()

    def evicted(self, *why: str) -> None:
        self.evicts(*why)
        self.settle()

    def label(self, labels: dict[str, str]) -> None:
        """Settle with other labels of the job."""
        self.job["metadata"]["labels"] = labels
        self.settle()

    def starts(self) -> None:
        """Let the job run in its first attempt."""
        self.settle()
        self.admitted()
        self.run_all_and_settle()

    def gives_back(self) -> None:
        """Settle, let Kueue evict what was deactivated, and check that the job rests then without quota."""
        self.settle()
        assert self.workload["spec"]["active"] is False and not self.pods_in_use()
        self.evicts("Deactivated", "The workload is deactivated")
        self.settle()
        self.forward(3600)
        assert self.settle() <= 1, "the status may change once, and then nothing"
        assert self.workload["spec"]["active"] is False and self.conditions()["QuotaReserved"][0] == "False"

    def pods_in_use(self) -> list[str]:
        return [name for name, pod in self.pods.items() if pod["status"]["phase"] in ("Pending", "Running")]

    def stops_pods(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if "deletionTimestamp" not in pod["metadata"]}


def started(**given: Any) -> Queued:
    """Return the world of a job in a queue that runs in its first attempt."""
    world = Queued(**given)
    world.starts()
    return world


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


def test_no_deadline_passes_while_a_job_waits_for_a_kueue_that_was_removed() -> None:
    world = started(activeDeadlineSeconds=3600)
    world.served = frozenset()
    world.fail(1)
    world.later(4000)
    assert world.condition("Running")["reason"] == "QueueUnavailable"
    world.served = None
    world.settle()
    assert world.status["attempt"] == 2


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


def test_a_workload_of_another_owner_is_left_alone_and_named() -> None:
    world = Queued()
    world.problems = (Problem("NameConflict", names.WORKLOADS, NAME, f"Workload {NAME} exists"),)
    world.reconcile(crash_after=1)
    assert world.condition("Running")["reason"] == "NameConflict" and world.condition("Stalled")["status"] == "True"
    assert world.status["state"] == "Queued"


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


def test_a_flavor_that_cannot_be_read_is_read_again_before_a_pod_that_stops_has_ended() -> None:
    world = started()
    world.lingering = True
    world.found[names.FLAVORS, "h100"] = Unknown("no answer", is_final=False)
    world.fail(1)
    assert world.status["state"] == "Queued" and world.pods_in_use()
    for pod in world.pods.values():
        pod["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=300))
    assert world.reconcile().requeue_after == LOOKUP_SECONDS


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


def test_a_flavor_that_does_not_exist_holds_no_quota_and_one_that_does_not_answer_takes_none() -> None:
    world = Queued()
    world.settle()
    world.found[names.FLAVORS, "h100"] = Unknown("no answer within 10 s", is_final=False)
    world.admitted()
    assert "no answer" in world.condition("Running")["message"]
    assert world.workload["spec"]["active"] is True and world.conditions()["QuotaReserved"][0] == "True"
    world.found[names.FLAVORS, "h100"] = Unknown("h100 not found")
    world.gives_back()
    assert world.reconcile().requeue_after == LOOKUP_SECONDS
    assert "not found" in world.condition("Running")["message"] and world.workload["spec"]["active"] is False
    world.found[names.FLAVORS, "h100"] = FLAVOR
    world.admitted()
    world.run_all()
    world.found[names.FLAVORS, "h100"] = Unknown("h100 not found")
    world.settle()
    assert world.condition("Running")["reason"] == "AllNodesRunning", "it has quota"


@pytest.mark.parametrize("flavors", [["f"] * 100_000, [str(n) for n in range(100_000)], "f" * 100_000, 1, None])
def test_a_hold_that_someone_wrote_asks_for_few_flavors(flavors: Any) -> None:
    world = Queued()
    world.settle()
    world.found[names.FLAVORS, "h100"] = Unknown("h100 not found")
    world.admits()
    world.gives_back()
    annotations = world.workload["metadata"]["annotations"]
    annotations[names.ANNOTATION_HELD] = json.dumps(
        json.loads(annotations[names.ANNOTATION_HELD]) | {"flavors": flavors}
    )
    assert len(world.reconcile().lookups) <= 1


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
