"""Gang schedulers: a PodGroup for each attempt, and the mark of the group in its pods.

A group is of one attempt, because coscheduling counts the ended pods of an earlier attempt towards ``minMember``, and
Volcano its succeeded tasks. Its name is that of the pods without node_rank, and it is created before them: if the API
server refuses it, there are no pods.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from ddpjob.api.text import shorten
from ddpjob.engine.actions import MAX_TEXT, Create, Delete, Obstacle
from ddpjob.engine.desired import owned_object
from ddpjob.engine.merge import merge
from ddpjob.engine.state import JobState

UNAVAILABLE = "GangSchedulerUnavailable"
"""The job asks for a system that is not there. It waits: it is never started without."""
NOT_ENFORCED = "GangNotEnforced"
"""The API server dropped the mark of the group: the scheduler places each pod by itself."""


class Gang(NamedTuple):
    """A system with PodGroups.

    kinds: of its groups, which the operator watches where they are served; the first that is served is used.
    spec: returns the spec of a group of all nodes.
    mark: returns what a pod has as a member of a group, as a part of the pod.
    scheduler: ``schedulerName`` of the pods where neither the template nor the operator's settings give one; "" for
        that of Kubernetes.
    not_placed: the condition of a PodGroup that is not placed, and the status that it then has.
    """

    kinds: tuple[Resource, ...]
    spec: Callable[[JobState, Resource], Json]
    mark: Callable[[str], Json]
    scheduler: str = ""
    not_placed: tuple[tuple[str, str], ...] = ()

    def kind(self, s: JobState) -> Resource:
        """Return the kind of PodGroup that the API server serves."""
        served = s.observed.served
        return next((kind for kind in self.kinds if served is None or kind.api_version in served), self.kinds[0])


def _of_volcano(s: JobState, kind: Resource) -> Json:
    """https://volcano.sh/en/docs/podgroup/

    Without ``minResources``: a group that Volcano admits by them keeps its place in the queue also without its pods.
    """
    annotations = s.job.wire.get("template", {}).get("metadata", {}).get("annotations", {})
    given = {
        "queue": annotations.get(names.ANNOTATION_VOLCANO_QUEUE),
        "priorityClassName": s.job.template_spec.get("priorityClassName"),
    }
    return {"minMember": s.job.nodes} | {key: value for key, value in given.items() if value}


def _of_kubernetes(s: JobState, kind: Resource) -> Json:
    """KEP-4671, feature gates GenericWorkload, GangScheduling."""
    # Victims of a preemption are whole groups. Without its feature gate the API server drops this and the priority.
    mode = "PodGroup" if kind.api_version.endswith("/v1alpha2") else {"all": {}}
    spec: Json = {"schedulingPolicy": {"gang": {"minCount": s.job.nodes}}, "disruptionMode": mode}
    if priority := s.job.template_spec.get("priorityClassName"):
        spec["priorityClassName"] = priority  # a group and its pods must have the same priority
    return spec


_OWN = "kubernetes"
GANG_SCHEDULERS: Mapping[str, Gang] = {
    _OWN: Gang(
        names.KUBERNETES_GROUPS,
        _of_kubernetes,
        lambda group: {"spec": {"schedulingGroup": {"podGroupName": group}}},
        not_placed=(("PodGroupScheduled", "False"), ("PodGroupInitiallyScheduled", "False")),
    ),
    "volcano": Gang(
        (names.VOLCANO_GROUPS,),
        _of_volcano,
        lambda group: {"metadata": {"annotations": {"scheduling.k8s.io/group-name": group}}},
        scheduler="volcano",
        not_placed=(("Unschedulable", "True"),),
    ),
    # https://github.com/kubernetes-sigs/scheduler-plugins/tree/master/pkg/coscheduling
    "coscheduling": Gang(
        (names.COSCHEDULING_GROUPS,),
        lambda s, _: {"minMember": s.job.nodes},
        lambda group: {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": group}}},
        scheduler="scheduler-plugins-scheduler",
    ),
}
"""By the setting ``gang_scheduler``."""


def _gang_scheduler(s: JobState) -> tuple[Gang | None, str]:
    """Return the gang scheduler that places the pods of the job, or why the one that the job asks for is not there."""
    policy, name = s.job.spec.placement.scheduling_policy, s.settings.gang_scheduler
    if name is None or (policy is not None and policy.basic is not None):
        return None, ""
    if (gang := GANG_SCHEDULERS.get(name)) is None:
        text = (
            "spec.scheduling asks for a gang, and the operator is configured for no gang scheduler: the administrator "
            "of the operator sets one (chart value scheduling.gangScheduler), or apply the job without it"
        )
        return None, text if policy is not None else ""
    served = s.observed.served
    if served is not None and not any(kind.api_version in served for kind in gang.kinds):
        wanted = " or ".join(kind.api_version for kind in gang.kinds)
        return None, f"the API server does not serve {wanted}, which the gang scheduler {name} needs"
    return gang, ""


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    _, why = _gang_scheduler(s)
    return (UNAVAILABLE, why) if why else None


def places_all_or_none(s: JobState) -> bool:
    """Whether a gang scheduler places the pods of the job."""
    return _gang_scheduler(s)[0] is not None


def objects(s: JobState, attempt: int) -> Sequence[Create]:
    """Return the group of an attempt, which must exist before its pods, if it does not."""
    gang, _ = _gang_scheduler(s)
    if gang is None:
        return ()
    name, kind = names.group_name(s.job.name, s.job.uid, attempt), gang.kind(s)
    if any(group["metadata"]["name"] == name for group in s.observed.objects.get(kind, ())):
        return ()
    return (owned_object(s.job, kind, name, gang.spec(s, kind), labels={names.LABEL_ATTEMPT: str(attempt)}),)


def dress(pod: Json, s: JobState, attempt: int) -> Json:
    """Return the rendered pod of node 0 as a member of the group, with its scheduler."""
    gang, _ = _gang_scheduler(s)
    if gang is None:
        return pod
    marked = merge(pod, gang.mark(names.group_name(s.job.name, s.job.uid, attempt)))
    scheduler = s.job.template_spec.get("schedulerName") or s.settings.scheduler_name or gang.scheduler
    return merge(marked, {"spec": {"schedulerName": scheduler or None}})


def unused(s: JobState, number: int, *, runs: bool) -> Sequence[Delete]:
    """Return the deletes of groups whose pods have stopped; a scheduler may still read that of a running pod."""
    gang, _ = _gang_scheduler(s)
    if gang is None:
        return ()
    used = {names.group_name(s.job.name, s.job.uid, pod.attempt) for pod in s.pods if not pod.stopped}
    if runs:
        used.add(names.group_name(s.job.name, s.job.uid, number))
    kind = gang.kind(s)
    return [
        Delete(kind, meta["name"], meta["uid"])
        for meta in (group["metadata"] for group in s.observed.objects.get(kind, ()))
        if meta["name"] not in used and "deletionTimestamp" not in meta and _attempt(meta["name"]) <= number
    ]


def _attempt(group: str) -> int:
    """Return the attempt in the name of a group. Another operator may know a later one than a stale job."""
    number = group.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def obstacle(s: JobState) -> Obstacle | None:
    """Return why the gang scheduler does not place all pods of the attempt, or not as the job asks for."""
    gang, _ = _gang_scheduler(s)
    waiting = [pod for pod in s.current.values() if pod.node_name is None and not pod.ended]
    if gang is None or not waiting:
        return None
    name = names.group_name(s.job.name, s.job.uid, s.attempt.number)
    for group in s.observed.objects.get(gang.kind(s), ()):
        if group["metadata"]["name"] == name and (text := _why_not_placed(gang, group.get("status") or {})):
            return "Unschedulable", f"PodGroup {name}: {shorten(text, MAX_TEXT)}"
    if s.settings.gang_scheduler == _OWN and not any(pod.group for pod in waiting):
        text = (
            "the API server dropped spec.schedulingGroup of the pods, so each is placed by itself: enable the "
            "feature gates GenericWorkload and GangScheduling of the API server and the scheduler"
        )
        return NOT_ENFORCED, text
    return None


def _why_not_placed(gang: Gang, status: Json) -> str:
    found = ((condition(status, kind), value) for kind, value in gang.not_placed)
    return next((str(each.get("message") or "") for each, value in found if each.get("status") == value), "")
