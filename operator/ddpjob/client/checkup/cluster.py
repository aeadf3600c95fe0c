"""Verdicts on a cluster and on what this user may do there: pure functions of what was read."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import seconds_since
from ddpjob.client.checkup.check import Check, cluster
from ddpjob.client.verdict.operator import serves

_MIN_KUBERNETES = (1, 29)
_MOST_SKEW = 60.0
_LEASE_SECONDS = 60.0
_INSTALL = "docs/start/install.md installs the operator: helm install ddpjob charts/ddpjob -n ddpjob-system"
_ALLOW = "an administrator: kubectl create rolebinding NAME -n {namespace} --clusterrole={role} --user=YOU"


@dataclass(frozen=True)
class Right:
    """A request of this user. need: view or edit, the role that has the right."""

    need: str
    verb: str
    group: str
    resource: str

    @property
    def text(self) -> str:
        return f"{self.verb} {self.resource}"


RIGHTS = (
    *(Right("view", verb, names.GROUP, "ddpjobs") for verb in ("get", "list", "watch")),
    Right("view", "list", "", "pods"),
    Right("view", "get", "", "pods/log"),
    Right("view", "list", "", "events"),
    Right("view", "get", "", "persistentvolumeclaims"),
    *(Right("edit", verb, names.GROUP, "ddpjobs") for verb in ("create", "patch", "delete")),
)
"""What the commands use."""


def server(version: Json, skew: float | None, error: str) -> Check:
    """Judge the API server. skew: by how many seconds this machine's clock is ahead of it. error: why it is silent."""
    if error:
        hint = "it restarts, a network or a proxy between is down, or the credentials of the kubeconfig have expired"
        return cluster(
            "api-server", "error", f"the API server does not answer: {error}", hint, "kubectl get --raw /readyz"
        )
    text = f"Kubernetes {version.get('gitVersion', 'of an unknown version')}"
    known = tuple(int(re.sub(r"\D", "", str(version.get(part))) or 0) for part in ("major", "minor"))
    if known < _MIN_KUBERNETES:
        needed = ".".join(map(str, _MIN_KUBERNETES))
        return cluster("api-server", "error", text, f"the operator needs Kubernetes {needed}", "upgrade the cluster")
    if skew is not None and abs(skew) > _MOST_SKEW:
        side = "ahead of" if skew > 0 else "behind"
        hint = "tokens and certificates may count as expired, or not valid yet"
        summary = f"{text}; this machine's clock is {abs(skew):.0f} s {side} the server's"
        return cluster("api-server", "warning", summary, hint, "timedatectl status")
    return cluster("api-server", "ok", text)


def crd(is_served: bool, served: Collection[str] | None, known: Collection[str]) -> Check:
    """Judge the CustomResourceDefinition.

    served: paths of the fields that the API server knows; None if it does not say. known: those of this release.
    """
    if not is_served:
        hint = "the CustomResourceDefinition is not installed, or this is another cluster than you meant"
        return cluster("crd", "error", "the cluster does not serve DDPJobs", hint, _INSTALL)
    if served is None:
        return cluster("crd", "unknown", "DDPJobs are served, with unknown fields", "", "kubectl explain ddpjob")
    missing, more = sorted({*known} - {*served}), sorted({*served} - {*known})
    if missing:
        return cluster(
            "crd",
            "warning",
            f"the CustomResourceDefinition lacks {len(missing)} fields of this release: {_some(missing)}",
            "it is of an earlier release; what the operator or ddpjob write into these fields is dropped",
            "kubectl apply --server-side -f manifests/crd.yaml of the operator's release",
        )
    if more:
        return cluster(
            "crd",
            "warning",
            f"the CustomResourceDefinition has {len(more)} fields that this release does not know: {_some(more)}",
            "this ddpjob is of an earlier release; it refuses these fields, and does not show them",
            "pip install --upgrade ddpjob",
        )
    return cluster("crd", "ok", "the CustomResourceDefinition has the fields of this release")


def rights(allowed: Mapping[Right, bool], namespace: str) -> Check:
    """Judge what this user may do."""
    lacking = {
        need: [r.text for r, given in allowed.items() if r.need == need and not given] for need in ("view", "edit")
    }
    where = f"in namespace {namespace}"
    if not any(given for right, given in allowed.items() if right.resource == names.DDPJOBS.plural):
        hint = "the role view of the namespace grants the right to read, edit also the right to change"
        todo = _ALLOW.format(namespace=namespace, role="edit")
        return cluster("rights", "error", f"you may neither read nor change DDPJobs {where}", hint, todo)
    if lacking["view"]:
        hint = "commands work with what they may read, and say what is missing"
        summary = f"you may not {_some(lacking['view'])} {where}"
        return cluster("rights", "warning", summary, hint, _ALLOW.format(namespace=namespace, role="view"))
    if lacking["edit"]:
        hint = "you may look at jobs, but not submit, change or delete them"
        summary = f"you may not {_some(lacking['edit'])} {where}"
        return cluster("rights", "warning", summary, hint, _ALLOW.format(namespace=namespace, role="edit"))
    return cluster("rights", "ok", f"you may submit, look at and change DDPJobs {where}")


@dataclass(frozen=True)
class Operators:
    """deployments: of operators. pods: theirs; None if they could not be read. lease: of several replicas, or None."""

    deployments: Sequence[Json]
    pods: Sequence[Json] | None = None
    lease: Json | None = None


def operator(found: Operators, namespace: str, now: datetime, version: str) -> Check:
    """Judge whether an operator works on the jobs of a namespace. version: of this program."""
    serving = [one for one in found.deployments if serves(one, namespace)]
    if not serving:
        others = f"; {len(found.deployments)} serve other namespaces" if found.deployments else ""
        hint = "jobs are stored, and nothing starts their pods"
        return cluster("operator", "error", f"no operator serves the namespace {namespace}{others}", hint, _INSTALL)
    one = next((each for each in serving if _ready(each)), serving[0])
    meta = one["metadata"]
    place, wanted = f"{meta['namespace']}/{meta['name']}", one["spec"].get("replicas", 1)
    look = f"kubectl -n {meta['namespace']} describe deployment {meta['name']}"
    if not _ready(one):
        why = _why_not_ready(found.pods or ())
        hint = "pods that run train on; nothing is started, stopped or restarted meanwhile"
        return cluster("operator", "error", f"{place}: 0 of {wanted} replicas are ready{why}", hint, look)
    text = f"{place}: {_ready(one)} of {wanted} replicas are ready"
    if found.lease is not None and (stale := _stale_seconds(found.lease, now)) > _LEASE_SECONDS:
        hint = "no replica holds the Lease, so none works"
        return cluster("operator", "error", f"{text}, but their Lease was renewed {stale:.0f} s ago", hint, look)
    running = str((meta.get("labels") or {}).get("app.kubernetes.io/version") or "")
    if running and running != version:
        hint = "neighbouring releases work together; fields of the later one are missing or not shown"
        return cluster(
            "operator", "warning", f"{text}, of release {running}; this is {version}", hint, "docs/tasks/operations.md"
        )
    return cluster("operator", "ok", f"{text}, of release {running or 'unknown'}")


# Who provisions a class; a class does not say which access modes it offers.
_SHARED = re.compile(
    r"nfs|efs\.csi|file\.csi|filestore|cephfs|fsx|lustre|weka|juicefs|gpfs|spectrumscale|beegfs|longhorn|gluster|portworx"
    r"|pxd|quobyte|vast|isilon|netapp|trident|azurefile|manila|sharedfile|smb\.csi|purestorage|hammerspace"
)
_ONE_NODE = re.compile(
    r"ebs|gce-?pd|pd\.csi|disk|cinder|vsphere-volume|local-path|hostpath|no-provisioner|topolvm|openebs\.io/local|lvm|rbd"
)


def storage(classes: Sequence[Json], claims: Sequence[Json]) -> Check:
    """Judge whether several pods can share a volume. claims: of the namespace, as far as they may be read."""
    bound = {
        str(claim["spec"].get("storageClassName") or "")
        for claim in claims
        if "ReadWriteMany" in (claim["spec"].get("accessModes") or ())
        and (claim.get("status") or {}).get("phase") == "Bound"
    }
    provisioners = {str(one["metadata"]["name"]): str(one.get("provisioner") or "") for one in classes}
    shared = [name for name, given in provisioners.items() if _SHARED.search(given) or name in bound]
    hint = "nodes resume from a volume that all of them mount; a job with one node needs none"
    todo = "name a class with ReadWriteMany in checkpoint.claimTemplate, or a claim in checkpoint.claimName"
    if shared or bound:
        return cluster(
            "storage", "ok", f"ReadWriteMany: {_some(sorted({*shared, *filter(None, bound)}) or ['a claim'])}"
        )
    if not provisioners:
        return cluster("storage", "warning", "there is no storage class", hint, "kubectl get storageclass")
    listed = _some([f"{name} ({given})" for name, given in provisioners.items()])
    if all(_ONE_NODE.search(given) for given in provisioners.values()):
        return cluster("storage", "warning", f"no storage class is known for ReadWriteMany: {listed}", hint, todo)
    return cluster("storage", "unknown", f"whether a class offers ReadWriteMany is not known: {listed}", hint, todo)


def fields_of(schema: Json) -> set[str]:
    """Return the paths of the fields of spec and status in the OpenAPI schema of DDPJobs."""
    found: set[str] = set()
    waiting: list[tuple[str, Any]] = [(part, (schema.get("properties") or {}).get(part)) for part in ("spec", "status")]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        found.add(path)
        waiting += ((f"{path}.{key}", inner) for key, inner in (part.get("properties") or {}).items())
        waiting.append((f"{path}[]", part.get("items")))
    return found - {"spec", "status"}


def _ready(deployment: Json) -> int:
    return int((deployment.get("status") or {}).get("readyReplicas") or 0)


def _why_not_ready(pods: Sequence[Json]) -> str:
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if reason := waiting.get("reason"):
                return f": {reason} {waiting.get('message') or ''}".rstrip()
    return "" if pods else ": it has no pods"


def _stale_seconds(lease: Json, now: datetime) -> float:
    renewed = (lease.get("spec") or {}).get("renewTime")
    return seconds_since(str(renewed), now) if renewed else float("inf")


def _some(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:3])
    return shown if len(texts) <= 3 else f"{shown} and {len(texts) - 3} more"
