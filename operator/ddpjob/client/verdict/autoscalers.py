"""What an autoscaler says of pods that no Kubernetes node fits: whether it adds a node, or why it adds none."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ddpjob.api.objects import Json, event_time
from ddpjob.api.pod_view import PodView
from ddpjob.client.verdict.explanation import Evidence, Explanation
from ddpjob.client.verdict.facts import Case, of_event
from ddpjob.client.verdict.scheduler import meaning
from ddpjob.engine.advice import BY_ADMINISTRATOR, Row

# Reasons of the events of autoscalers about a pod: Cluster Autoscaler, also of GKE, and Karpenter, also of EKS.
# https://github.com/kubernetes/autoscaler/tree/cluster-autoscaler-1.34.0/cluster-autoscaler: processors/status and
# core/scaleup/orchestrator
# https://github.com/kubernetes-sigs/karpenter/tree/v1.7.0/pkg/controllers/provisioning/scheduling
_NODE_ADDED = frozenset({"TriggeredScaleUp", "Nominated"})
_NO_NODE_ADDED = frozenset({"NotTriggerScaleUp", "FailedScaleUp"})
_KARPENTER = frozenset({"karpenter", "eks-auto-mode/compute"})
"""Components whose FailedScheduling says that no node is added; it is also the reason of the scheduler."""
_PROVISION_SECONDS = 900.0
"""After this time both autoscalers give up a machine that has not become a node (--max-node-provision-time)."""
_CAUSES: Sequence[Row] = (
    Row(
        r"max node group size|max cluster .+ limit|max total nodes|exceed limits|limits have been exhausted",
        "the node group, the node pool or the cluster may not get larger",
        "wait until other pods end, request less in spec.resources, or have the administrator raise the limit",
    ),
    Row(
        r"(?i)FailedScaleUp|in backoff|insufficient capacity|could not be reserved",
        "the cloud has no such machine at present, or a quota or the addresses of the cloud are used up",
        "wait: the autoscaler tries again; the administrator can allow another machine type or zone, or more quota",
    ),
    Row(
        r"not ready for scale-up",
        "the node group is not healthy: too many of its nodes are not ready",
        f"wait, or {BY_ADMINISTRATOR}kubectl get nodes, and to look at the node group",
    ),
    Row(
        r"filtered out all|no nodepools",
        "no node pool of the cluster has machines at all",
        f"{BY_ADMINISTRATOR}kubectl describe nodepools",
    ),
    Row(
        r"incompatible requirements|Pod's node affinity|not tolerate|untolerated|Insufficient|no instance type"
        r"|wouldn't fit",
        "no node group or node pool has machines that fit what the pods ask for",
        "correct spec.resources, or nodeSelector, affinity and tolerations in spec.template",
    ),
)
"""Hint and next by the reason and message of an event that no node is added; a message may have several causes."""


def scaling(case: Case) -> "Explanation | Refusal | None":
    """Return what an autoscaler does for the pods without a Kubernetes node; of several events a refusal decides."""
    events = [(pod, _of_autoscaler(case, pod)) for pod in case.current if pod.unschedulable is not None]
    found = [(pod, event) for pod, event in events if event is not None]
    pod, event = min(found, key=lambda each: each[1]["reason"] in _NODE_ADDED, default=(None, None))
    if pod is None or event is None:
        return None
    return _node_added(case, pod, event) if event["reason"] in _NODE_ADDED else _no_node_added(event, case.namespace)


def _of_autoscaler(case: Case, pod: PodView) -> Json | None:
    for event in reversed(case.events_of("Pod", pod.name)):
        component = event.get("reportingComponent") or (event.get("source") or {}).get("component")
        is_of_karpenter = event.get("reason") == "FailedScheduling" and component in _KARPENTER
        if is_of_karpenter or event.get("reason") in _NODE_ADDED | _NO_NODE_ADDED:
            return event
    return None


def _node_added(case: Case, pod: PodView, event: Json) -> Explanation:
    """Explain a pod for which an autoscaler has ordered a machine."""
    age = case.seconds_since(event_time(event))
    is_late = age > _PROVISION_SECONDS
    what = f"was to be added {int(age / 60)} min ago and has not come" if is_late else "is being added"
    return case.verdict(
        "Placement",
        str(event["reason"]),
        f"{case.name} waits: a Kubernetes node {what} for {pod.where}: {event.get('message')}",
        [of_event(event)],
        is_abnormal=is_late,
        confidence="Medium" if is_late else "High",
        hint="the cloud has no such machine at present, or the machine cannot join the cluster" if is_late else "",
        next=f"{BY_ADMINISTRATOR}kubectl get nodes" if is_late else f"ddpjob why {case.name}, again in some minutes",
        **case.place_of(pod),
    )


class Refusal(NamedTuple):
    """Why an autoscaler adds no node, its event, and hint and next if they are known."""

    why: str = ""
    event: Evidence | None = None
    advice: tuple[str, str] | None = None


def _no_node_added(event: Json, namespace: str) -> Refusal:
    message = str(event.get("message"))
    found = [row for row in _CAUSES if re.search(row.pattern, f"{event['reason']}: {message}")]
    advice = ("; or ".join(row.hint for row in found), found[0].next) if found else meaning(message).advice(namespace)
    return Refusal(f"; no node is added: {message}", of_event(event), advice)
