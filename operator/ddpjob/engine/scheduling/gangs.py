"""Gang schedulers: a PodGroup for each attempt, and the mark of the group in its pods.

A group is of one attempt, because coscheduling counts the ended pods of an earlier attempt towards ``minMember``, and
Volcano its succeeded tasks. Its name is that of the pods without node_rank, and it is created before them: if the API
server refuses it, there are no pods.
"""

from collections.abc import Sequence
from typing import ClassVar

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from ddpjob.api.text import shorten
from ddpjob.engine.actions import MAX_TEXT, Create, Delete, Obstacle
from ddpjob.engine.desired import owned_object
from ddpjob.engine.state import JobState

NOT_ENFORCED = "GangNotEnforced"
"""The API server dropped the mark of the group: the scheduler places each pod by itself."""


class Gang:
    """A system with PodGroups.

    kinds: of its groups, which the operator watches where they are served; the first that is served is used.
    scheduler: ``schedulerName`` of the pods where neither the template nor the operator's settings give one; "" for
        that of Kubernetes.
    not_placed: the condition of a PodGroup that is not placed, and the status that it then has.
    """

    kinds: ClassVar[tuple[Resource, ...]] = ()
    scheduler: ClassVar[str] = ""
    not_placed: ClassVar[Sequence[tuple[str, str]]] = ()

    def spec(self, s: JobState, kind: Resource) -> Json:
        """Return the spec of a PodGroup of all nodes."""
        raise NotImplementedError

    def marked(self, pod: Json, group: str) -> Json:
        """Return the pod as a member of a group."""
        raise NotImplementedError

    def kind(self, s: JobState) -> Resource:
        """Return the kind of PodGroup that the API server serves."""
        served = s.observed.served
        return next((kind for kind in self.kinds if served is None or kind.api_version in served), self.kinds[0])

    def objects(self, s: JobState, attempt: int) -> Sequence[Create]:
        """Return the group of an attempt, which must exist before its pods, if it does not."""
        name, kind = names.group_name(s.job.name, s.job.uid, attempt), self.kind(s)
        if any(group["metadata"]["name"] == name for group in s.observed.objects.get(kind, ())):
            return ()
        return (owned_object(s.job, kind, name, self.spec(s, kind), labels={names.LABEL_ATTEMPT: str(attempt)}),)

    def dress(self, pod: Json, s: JobState, attempt: int) -> Json:
        """Return the rendered pod of node 0 as a member of the group, with its scheduler."""
        marked = self.marked(pod, names.group_name(s.job.name, s.job.uid, attempt))
        scheduler = s.job.template_spec.get("schedulerName") or s.settings.scheduler_name or self.scheduler
        return marked | {"spec": marked["spec"] | {"schedulerName": scheduler}} if scheduler else marked

    def unused(self, s: JobState, number: int, *, runs: bool) -> Sequence[Delete]:
        """Return the deletes of groups whose pods have stopped; a scheduler may still read that of a running pod."""
        used = {names.group_name(s.job.name, s.job.uid, pod.attempt) for pod in s.pods if not pod.stopped}
        if runs:
            used.add(names.group_name(s.job.name, s.job.uid, number))
        kind = self.kind(s)
        groups = [group["metadata"] for group in s.observed.objects.get(kind, ())]
        return [
            Delete(kind, meta["name"], meta["uid"])
            for meta in groups
            if meta["name"] not in used and "deletionTimestamp" not in meta and _attempt(meta["name"]) <= number
        ]

    def obstacle(self, s: JobState) -> Obstacle | None:
        """Return why the system does not place all pods of the attempt, or not as the job asks for."""
        if not any(pod.node_name is None and not pod.ended for pod in s.current.values()):
            return None
        name = names.group_name(s.job.name, s.job.uid, s.attempt.number)
        for group in s.observed.objects.get(self.kind(s), ()):
            if group["metadata"]["name"] == name and (text := self._why_not_placed(group.get("status") or {})):
                return "Unschedulable", f"PodGroup {name}: {shorten(text, MAX_TEXT)}"
        return None

    def _why_not_placed(self, status: Json) -> str:
        found = ((condition(status, kind), value) for kind, value in self.not_placed)
        return next((str(each.get("message") or "") for each, value in found if each.get("status") == value), "")


def _attempt(group: str) -> int:
    """Return the attempt in the name of a group. Another operator may know a later one than a stale job."""
    number = group.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


class Volcano(Gang):
    """https://volcano.sh/en/docs/podgroup/

    Without ``minResources``: a group that Volcano admits by them keeps its place in the queue also without its pods.
    """

    kinds = (names.VOLCANO_GROUPS,)
    scheduler = "volcano"
    not_placed = (("Unschedulable", "True"),)

    def spec(self, s: JobState, kind: Resource) -> Json:
        annotations = s.job.wire.get("template", {}).get("metadata", {}).get("annotations", {})
        given = {
            "queue": annotations.get(names.ANNOTATION_VOLCANO_QUEUE),
            "priorityClassName": s.job.template_spec.get("priorityClassName"),
        }
        return {"minMember": s.job.nodes} | {key: value for key, value in given.items() if value}

    def marked(self, pod: Json, group: str) -> Json:
        annotations = (pod["metadata"].get("annotations") or {}) | {"scheduling.k8s.io/group-name": group}
        return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}


class Coscheduling(Gang):
    """https://github.com/kubernetes-sigs/scheduler-plugins/tree/master/pkg/coscheduling"""

    kinds = (names.COSCHEDULING_GROUPS,)
    scheduler = "scheduler-plugins-scheduler"

    def spec(self, s: JobState, kind: Resource) -> Json:
        return {"minMember": s.job.nodes}

    def marked(self, pod: Json, group: str) -> Json:
        labels = pod["metadata"]["labels"] | {"scheduling.x-k8s.io/pod-group": group}
        return pod | {"metadata": pod["metadata"] | {"labels": labels}}


class Kubernetes(Gang):
    """The PodGroup of Kubernetes, with its own scheduler: KEP-4671, feature gates GenericWorkload, GangScheduling."""

    kinds = names.KUBERNETES_GROUPS
    not_placed = (("PodGroupScheduled", "False"), ("PodGroupInitiallyScheduled", "False"))

    def spec(self, s: JobState, kind: Resource) -> Json:
        # Victims of a preemption are whole groups. Without its feature gate the API server drops this and the priority.
        mode = "PodGroup" if kind.api_version.endswith("/v1alpha2") else {"all": {}}
        spec: Json = {
            "schedulingPolicy": {"gang": {"minCount": s.job.nodes}},
            "disruptionMode": mode,
        }
        if priority := s.job.template_spec.get("priorityClassName"):
            spec["priorityClassName"] = priority  # a group and its pods must have the same priority
        return spec

    def marked(self, pod: Json, group: str) -> Json:
        return pod | {"spec": pod["spec"] | {"schedulingGroup": {"podGroupName": group}}}

    def obstacle(self, s: JobState) -> Obstacle | None:
        if (found := super().obstacle(s)) is not None:
            return found
        waiting = [pod for pod in s.current.values() if pod.node_name is None and not pod.ended]
        if waiting and not any(pod.group for pod in waiting):
            text = (
                "the API server dropped spec.schedulingGroup of the pods, so each is placed by itself: enable the "
                "feature gates GenericWorkload and GangScheduling of the API server and the scheduler"
            )
            return NOT_ENFORCED, text
        return None
