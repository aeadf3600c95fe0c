"""Gang schedulers: a PodGroup for each attempt, created before its pods and deleted when they have stopped."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.engine.actions import EngineSettings, Problem
from ddpjob.engine.scheduling.gangs import GANG_SCHEDULERS
from tests.builders import UID, World, a_job, ended, failed, running

V1BETA1, V1ALPHA2 = names.KUBERNETES_GROUPS


def a_world(scheduler: str | None = "volcano", *, scheduler_name: str = "", **spec: Any) -> World:
    world = World(a_job(**spec))
    world.settings = EngineSettings(gang_scheduler=scheduler, scheduler_name=scheduler_name)
    return world


def groups(world: World) -> list[str]:
    return sorted(name for found in world.groups.values() for name in found)


def group(attempt: int) -> str:
    return names.group_name("mnist", UID, attempt)


def marks(pod: dict[str, Any]) -> set[tuple[str, str]]:
    """Return what makes a pod a member of a group, and its scheduler."""
    meta, spec = pod["metadata"], pod["spec"]
    found = {
        ("volcano", (meta.get("annotations") or {}).get("scheduling.k8s.io/group-name")),
        ("coscheduling", meta["labels"].get("scheduling.x-k8s.io/pod-group")),
        ("kubernetes", (spec.get("schedulingGroup") or {}).get("podGroupName")),
        ("scheduler", spec.get("schedulerName")),
    }
    return {(kind, value) for kind, value in found if value}


@pytest.mark.parametrize(
    ("scheduler", "kind", "spec", "placed_by"),
    [
        ("volcano", names.VOLCANO_GROUPS, {"minMember": 2}, {("scheduler", "volcano")}),
        ("coscheduling", names.COSCHEDULING_GROUPS, {"minMember": 2}, {("scheduler", "scheduler-plugins-scheduler")}),
        (
            "kubernetes",
            V1BETA1,
            {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": {"all": {}}},
            set(),
        ),
    ],
)
def test_group_of_all_nodes_is_created_before_the_marked_pods(
    scheduler: str, kind: Resource, spec: dict[str, Any], placed_by: set[tuple[str, str]]
) -> None:
    world = a_world(scheduler)
    first, *_, pods = world.reconcile().creates
    (created,) = [create for create in first if create.resource is kind]
    assert created.name == group(1) and created.body["spec"] == spec
    assert created.body["metadata"]["ownerReferences"][0]["uid"] == UID
    assert {create.resource for create in pods} == {names.PODS, names.SERVICES}
    for rank in range(2):
        assert marks(world.pod(rank)) == {(scheduler, group(1)), *placed_by}
    world.settle()
    assert groups(world) == [group(1)]


def test_queue_and_priority_of_the_template_are_the_groups() -> None:
    meta = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    world = a_world(template={"metadata": meta, "spec": {"priorityClassName": "high"}})
    world.settle()
    spec = world.groups[names.VOLCANO_GROUPS][group(1)]["spec"]
    assert spec == {"minMember": 2, "queue": "research", "priorityClassName": "high"}


def test_scheduler_of_the_template_wins_over_the_settings() -> None:
    world = a_world("coscheduling", scheduler_name="gangs")
    world.settle()
    assert ("scheduler", "gangs") in marks(world.pod(0))
    world = a_world("coscheduling", scheduler_name="gangs", template={"spec": {"schedulerName": "mine"}})
    world.settle()
    assert ("scheduler", "mine") in marks(world.pod(0))


@pytest.mark.parametrize("scheduler", [*GANG_SCHEDULERS])
def test_each_attempt_has_its_own_group_and_the_old_one_goes_with_its_pods(scheduler: str) -> None:
    world = a_world(scheduler)
    world.settle()
    world.run_all_and_settle()
    world.lingering = True
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["attempt"] == 2 and groups(world) == [group(1), group(2)]
    assert (scheduler, group(2)) in marks(world.pod(0))
    world.pods = {name: pod for name, pod in world.pods.items() if "deletionTimestamp" not in pod["metadata"]}
    world.settle()
    assert groups(world) == [group(2)]


def test_no_group_is_left_of_a_finished_or_suspended_job() -> None:
    finished = a_world()
    finished.settle()
    finished.show_all(ended(0))
    assert finished.status["state"] == "Succeeded" and groups(finished) == []
    suspended = a_world()
    suspended.settle()
    suspended.suspend(True)
    assert suspended.status["state"] == "Suspended" and groups(suspended) == []
    suspended.suspend(False)
    assert groups(suspended) == [group(2)]


@pytest.mark.parametrize("crash_after", range(1, 6))
def test_crash_between_any_two_writes_leaves_one_group_and_all_pods(crash_after: int) -> None:
    world = a_world()
    world.reconcile(crash_after=crash_after)
    world.settle()
    assert groups(world) == [group(1)] and len(world.pods) == 2


def test_a_refused_group_means_no_pods_and_a_retry_with_delay() -> None:
    world = a_world()
    world.reconcile(crash_after=1)
    world.problems = (Problem("CreateRefused", names.VOLCANO_GROUPS, group(1), "queue research does not exist"),)
    world.reconcile()
    world.problems = ()
    assert not world.pods and world.condition("Running")["reason"] == "CreateRefused"
    world.settle_after_backoff()
    assert len(world.pods) == 2 and world.status["restarts"] == 0


def test_basic_policy_needs_no_group() -> None:
    world = a_world(scheduling={"schedulingPolicy": {"basic": {}}})
    world.settle()
    assert len(world.pods) == 2 and not world.groups and not marks(world.pod(0))


@pytest.mark.parametrize(
    ("scheduler", "served", "says"),
    [
        ("", None, "scheduling.gangScheduler"),
        ("volcano", frozenset[str](), "does not serve scheduling.volcano.sh/v1beta1"),
    ],
    ids=["not configured", "not installed"],
)
def test_gang_without_its_scheduler_waits_and_starts_later(
    scheduler: str, served: frozenset[str] | None, says: str
) -> None:
    world = a_world(scheduler, scheduling={"schedulingPolicy": {"gang": {}}})
    world.served = served
    world.settle()
    assert not world.pods and world.status["state"] == "Queued"
    for shown in (world.condition("Running"), world.condition("Scheduled")):
        assert shown["reason"] == "GangSchedulerUnavailable" and says in shown["message"]
    world.settings = EngineSettings(gang_scheduler="volcano")
    world.served = frozenset({names.VOLCANO_GROUPS.api_version})
    world.settle()
    assert len(world.pods) == 2 and world.status["attempt"] == 1


def test_a_gang_scheduler_that_vanishes_touches_no_running_pod() -> None:
    world = a_world()
    world.settle()
    world.run_all_and_settle()
    world.served = frozenset()
    assert world.settle() == 0 and world.status["state"] == "Running"
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["state"] == "Restarting" and world.condition("Running")["reason"] == "GangSchedulerUnavailable"
    world.served = None
    world.settle()
    assert world.status["attempt"] == 2 and len([pod for pod in world.pods if "-2-" in pod]) == 2


def test_message_of_a_group_that_is_not_placed_is_shown() -> None:
    world = a_world()
    world.settle()
    status = {"conditions": [{"type": "Unschedulable", "status": "True", "message": "2/2 tasks in gang unschedulable"}]}
    world.groups[names.VOLCANO_GROUPS][group(1)]["status"] = status
    world.settle()
    scheduled = world.condition("Scheduled")
    assert scheduled["reason"] == "Unschedulable" and "2/2 tasks in gang unschedulable" in scheduled["message"]


def test_a_dropped_mark_of_the_group_is_shown() -> None:
    world = a_world("kubernetes")
    world.settle()
    for pod in world.pods.values():
        pod["spec"] = {key: value for key, value in pod["spec"].items() if key != "schedulingGroup"}
    world.settle()
    assert world.condition("Scheduled")["reason"] == "GangNotEnforced"
    world.show_all(running())
    assert world.condition("Scheduled")["status"] == "True"


def test_a_scheduler_that_vanishes_before_the_pods_exist_starts_none_without_it() -> None:
    world = a_world(scheduling={"schedulingPolicy": {"gang": {}}})
    world.reconcile(crash_after=1)  # the attempt is recorded
    world.served = frozenset()
    world.settle()
    assert not world.pods and world.condition("Running")["reason"] == "GangSchedulerUnavailable"
    world.forward(1800)
    assert world.settle() == 0 and world.plans[-1].requeue_after is None, "the job waits for an event"
    world.served = None
    world.settle()
    assert len(world.pods) == 2 and groups(world) == [group(2)] and world.status["restarts"] == 0


def test_groups_of_an_earlier_version_of_the_api_do_not_stop_the_job() -> None:
    world = a_world("kubernetes")
    world.served = frozenset({V1ALPHA2.api_version})
    world.settle()
    world.run_all_and_settle()
    world.served = frozenset({V1BETA1.api_version})
    world.groups[V1BETA1] = dict(world.groups[V1ALPHA2])  # the same objects; the old version is no longer listed
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    assert world.status["attempt"] == 2 and all(delete.resource is not V1ALPHA2 for delete in world.plans[-1].deletes)
    assert [*world.groups[V1BETA1]] == [group(2)]


def test_pods_that_run_without_a_group_get_none() -> None:
    """The gang scheduler was configured while the job ran."""
    world = a_world("")
    world.settle()
    world.run_all_and_settle()
    world.settings = EngineSettings(gang_scheduler="volcano")
    assert world.settle() == 0 and not world.groups


def test_a_group_of_a_later_attempt_is_not_deleted() -> None:
    world = a_world()
    world.settle()
    body = world.groups[names.VOLCANO_GROUPS][group(1)]
    later = body | {"metadata": body["metadata"] | {"name": group(7), "uid": "later"}}
    world.groups[names.VOLCANO_GROUPS][group(7)] = later
    world.settle()
    assert groups(world) == [group(1), group(7)]
