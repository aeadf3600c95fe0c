"""What the scheduler says of the Kubernetes nodes that a pod cannot use: what each clause of its message means."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ddpjob.engine.advice import BY_ADMINISTRATOR, Row

# Taints that the control plane, an autoscaler or a driver sets while a node is not ready, or is being removed.
_OF_STATE = (
    r"node\.kubernetes\.io/(?:not-ready|unreachable|out-of-service|[\w-]+-pressure|network-unavailable)|node\.cloudprovider\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler"
    r"|karpenter\.sh/(?:disrupt|unregistered)|cloud\.google\.com/impending-node-termination"
    r"|[\w.-]+/(?:[\w.-]+-)?(?:not-ready|uninitialized)|startup-taint\.cluster-autoscaler\.|readiness\.k8s\.io/"
)
_CONTROL_PLANE = re.compile(r"had untolerated taint \{node-role\.kubernetes\.io/(control-plane|master)[^}]*\}")
_TAINTS = f"{BY_ADMINISTRATOR}kubectl get nodes -o custom-columns=NAME:.metadata.name,TAINTS:.spec.taints"
_LABELS = f"{BY_ADMINISTRATOR}kubectl get nodes --show-labels"
NO_CLAIM = Row(
    r'persistentvolumeclaim "[^"]+" not found',
    "a volume of the pods names a claim that does not exist",
    "kubectl get pvc -n {namespace}; create the claim, or correct checkpoint.claimName or the volume",
    "Volume",
)
_UNNAMED_TAINT = Row(
    r"untolerated taint\(s\)",  # the scheduler names no taint since Kubernetes 1.34, so the nodes may also be broken
    "the nodes that would fit are reserved by a taint, or are not ready, which a taint under node.kubernetes.io/ shows",
    f"{_TAINTS}; repair nodes that are not ready; a taint that reserves nodes can be tolerated in spec.template",
    "Taint",
)
ROWS: Sequence[Row] = (
    NO_CLAIM,
    Row(
        r"is being deleted",
        "the claim is being deleted, which ends when no pod uses it",
        "kubectl describe pvc -n {namespace}; create the claim again when it is gone, or name another one",
        "Volume",
    ),
    Row(
        r"non-existent (?:pv|persistentvolume)",
        "the volume of the claim was deleted",
        "kubectl get pvc -n {namespace}; delete the claim and create it again, or have its volume restored",
        "Volume",
    ),
    Row(
        r"volume node affinity|PersistentVolume's node affinity|volume zone|volume requirements",
        "the volume can be used in another zone or on another Kubernetes node only",
        "use a claim whose class binds with WaitForFirstConsumer, or nodes of the zone of the volume; "
        f"{BY_ADMINISTRATOR}kubectl describe pv",
        "Volume",
    ),
    Row(
        r"ReadWriteOncePod|no available disk",
        "another pod uses the volume, and only one can at a time",
        "use a claim with the access mode ReadWriteMany, or end the other pod that uses the volume",
        "Volume",
    ),
    Row(
        r"max volume count|exceed volume limit",
        "no Kubernetes node that would fit can attach one more volume",
        f"end other pods with volumes, or use other nodes; {BY_ADMINISTRATOR}kubectl get csinodes -o yaml",
        "Volume",
    ),
    Row(
        r"enough free storage",
        "no storage that the Kubernetes nodes reach has so much space left",
        "request a smaller volume in checkpoint.claimTemplate or in the claim, or make space",
        "Volume",
    ),
    Row(
        r"CSI driver is not installed",
        "the Kubernetes nodes lack the driver of the volume",
        f"{BY_ADMINISTRATOR}kubectl get csinodes, and to install the driver",
        "Volume",
    ),
    Row(
        r"waiting for ephemeral volume controller",
        "the control plane has not created the claim of an ephemeral volume yet",
        "wait; if it lasts: kubectl get pvc,events -n {namespace}",
        "Volume",
    ),
    Row(
        r"(?i)unbound immediate PersistentVolumeClaim|volumes to bind|StorageClass|binding volumes",
        "no volume fits the claim, or nothing provisions its storage class",
        "kubectl describe pvc -n {namespace}; correct checkpoint.claimTemplate or the claim; "
        f"{BY_ADMINISTRATOR}kubectl get storageclass",
        "Volume",
    ),
    Row(
        r"Insufficient [\w./-]+",
        "no Kubernetes node has so much free: other pods use it, or no node is that large",
        "request less in spec.resources, or use fewer nodes; "
        f"{BY_ADMINISTRATOR}kubectl describe nodes, which shows what is allocated",
        "Resource",
    ),
    Row(
        r"Too many pods",
        "the Kubernetes nodes that would fit run as many pods as their kubelets allow (maxPods), or have addresses for",
        f"end other pods; {BY_ADMINISTRATOR}kubectl get nodes -o "
        "custom-columns=NAME:.metadata.name,PODS:.status.allocatable.pods",
        "Resource",
    ),
    Row(
        r"cannot allocate all claims|resourceclaim (?:not available|in use)",
        "no Kubernetes node has the devices of the pod's resource claims free",
        "use fewer nodes, or request other devices; "
        f"{BY_ADMINISTRATOR}kubectl get resourceclaims,resourceslices -n {{namespace}}",
        "Resource",
    ),
    Row(
        r"resourceclaim\S* \S+ not found|device class \S+ does not exist|create the resourceclaim|ResourceClaim not",
        "a resource claim of the pods, or its device class, does not exist",
        "correct resourceClaims in spec.template; "
        f"{BY_ADMINISTRATOR}kubectl get resourceclaims,deviceclasses -n {{namespace}}",
        "Resource",
    ),
    # A filter that fails for a node hides those after it: a cordoned node may be the one that a selector names.
    Row(
        rf"taint \{{(?:{_OF_STATE})",
        "the nodes that would fit are not ready or are being removed: the taint shows this, and ends with it",
        f"{BY_ADMINISTRATOR}kubectl get nodes; the job starts when they are ready",
        "NodeNotReady",
    ),
    Row(
        r"were unschedulable|taint \{node\.kubernetes\.io/unschedulable",
        "a person cordoned the nodes, or drains them",
        f"{BY_ADMINISTRATOR}kubectl get nodes, and kubectl uncordon NODE",
        "Cordoned",
    ),
    Row(
        r"topology spread constraints \(missing required label\)",
        "the Kubernetes nodes lack the label over which the pods are spread",
        f"{_LABELS}; correct topologyKey of topologySpreadConstraints in spec.template",
        "Affinity",
    ),
    Row(
        r"topology spread",
        "one more pod on the nodes with room would spread the pods more unevenly than maxSkew allows",
        "correct topologySpreadConstraints in spec.template (whenUnsatisfiable: ScheduleAnyway), or use fewer nodes",
        "Affinity",
    ),
    Row(
        r"existing pods anti-affinity",
        "pods that run on the nodes exclude this pod by their podAntiAffinity",
        f"use other nodes, or correct the labels of spec.template; {BY_ADMINISTRATOR}kubectl get pods -A -o wide",
        "Affinity",
    ),
    Row(
        r"pod anti-affinity",
        "each node that would fit runs a pod that podAntiAffinity excludes",
        "use fewer nodes, or correct affinity.podAntiAffinity in spec.template",
        "Affinity",
    ),
    Row(
        r"pod affinity",
        "no Kubernetes node runs, or is near, the pods that podAffinity requires",
        f"correct affinity.podAffinity in spec.template; {BY_ADMINISTRATOR}kubectl get pods -A -o wide --show-labels",
        "Affinity",
    ),
    Row(
        r"scheduler-enforced node affinity",
        "the profile of the scheduler restricts its pods to other Kubernetes nodes",
        "use another schedulerName in spec.template, or ask the administrator of the scheduler",
        "Affinity",
    ),
    Row(
        r"didn't match Pod's node affinity",
        "no Kubernetes node has the labels that nodeSelector or affinity in spec.template require",
        f"{_LABELS}; correct nodeSelector or affinity in spec.template",
        "Affinity",
    ),
    Row(
        r"didn't match Pod's required features",
        "the kubelets or container runtimes are too old for a field of the pods",
        "remove the field from spec.template, or use nodes with a newer version; "
        f"{BY_ADMINISTRATOR}kubectl get nodes -o wide",
        "Unschedulable",
    ),
    Row(
        r"^no nodes available",
        "the cluster has no Kubernetes node",
        f"{BY_ADMINISTRATOR}kubectl get nodes, and to add nodes, if no autoscaler does",
        "Unschedulable",
    ),
    _UNNAMED_TAINT,
    Row(
        r"(?:untolerated|had) taint(?! \{node\.kubernetes\.io/unschedulable)",
        "the nodes that would fit are reserved for pods that tolerate their taint",
        f"{_TAINTS}; tolerate it in spec.template",
        "Taint",
    ),
    Row(
        r"didn't have free ports",
        "pods with hostNetwork or hostPort use the port",
        "use other ports, or fewer nodes on one machine",
        "Ports",
    ),
)
"""For each clause the first row that matches, whose reason is that of the explanation; of several clauses, the row that
is further up decides.

https://github.com/kubernetes/kubernetes/tree/v1.36.0/pkg/scheduler/framework/plugins; autoscalers quote it, too.
"""
_AVOIDED = re.compile(r"(\d+) node\(s\) didn't match Pod's node affinity")
_LISTED = re.compile(r"nodes are (?:un)?available: (.*?)(?:\.(?:\s|$)|$)", re.DOTALL)
_NEXT_CLAUSE = re.compile(r", (?=\d+ )")


class Meaning(NamedTuple):
    """rows: of the clauses, the one that decides first. unknown: the clauses that no row knows."""

    rows: Sequence[Row]
    unknown: Sequence[str]

    @property
    def reason(self) -> str:
        return self.rows[0].reason if self.rows else "Unschedulable"

    @property
    def is_sure(self) -> bool:
        return len(self.rows) == 1 and not self.unknown and self.rows[0] is not _UNNAMED_TAINT

    def advice(self, namespace: str) -> tuple[str, str] | None:
        """Return hint and next by the two clauses that decide first; None if no clause is known."""
        first = self.rows[:2]
        hints = [*(row.hint for row in first), *self.unknown]
        todo = "; or ".join(row.next.format(namespace=namespace) for row in first)
        return ("; or ".join(hints), todo) if first else None


def meaning(message: str, avoided: int = 0) -> Meaning:
    """Return what a message says of the nodes; of a control plane only if there is no other node.

    avoided: how many nodes the operator excludes by an affinity of its own.
    """
    listed = _LISTED.search(message)
    clauses = _NEXT_CLAUSE.split(listed[1] if listed else message)
    clauses = [clause for clause in clauses if not _CONTROL_PLANE.search(clause)] or clauses
    clauses = [text for text in clauses if not ((own := _AVOIDED.match(text)) and int(own[1]) <= avoided)]
    found = {clause: next((row for row in ROWS if re.search(row.pattern, clause)), None) for clause in clauses}
    rows = sorted({row for row in found.values() if row is not None}, key=ROWS.index)
    return Meaning(rows, [clause for clause, row in found.items() if row is None])
