"""The Workload of a job: what Kueue says in it, and what the operator writes to it. ``kueue`` decides when."""

import hashlib
import json
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, condition, is_true
from ddpjob.api.text import shorten
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import MAX_TEXT, Change, Create
from ddpjob.engine.desired import desired_pods, owned_object
from ddpjob.engine.state import JobState

POD_SET = "main"

_DIGEST_FORM = "v1:"
# What a queue decides on; all else of a pod, such as its command, is of no interest to it.
_POD_FIELDS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "schedulerName",
    "runtimeClassName",
    "overhead",
    "resources",
    "resourceClaims",
)
_CONTAINER_FIELDS = ("name", "resources", "restartPolicy")
# Evictions after which the Workload is in the queue again at once; after others Kueue decides when.
_REQUEUED_AT_ONCE = frozenset({"Preempted", "NodeFailures"})
_RECOVERY = frozenset({"WaitForRecovery", "Recovered"})


class Workload:
    """A Workload as the API server returned it."""

    def __init__(self, body: Json) -> None:
        self.meta: Json = body["metadata"]
        self.spec: Json = body["spec"]
        self.status: Json = body["status"]
        self.annotations: Json = self.meta.get("annotations") or {}

    def has(self, kind: str) -> bool:
        """Return whether a condition is True."""
        return is_true(self.status, kind)

    @property
    def is_active(self) -> bool:
        """Whether Kueue may admit it."""
        return self.spec.get("active") is not False

    @property
    def is_admitted(self) -> bool:
        """Whether the job has quota, and may start."""
        return self.has("Admitted") and self.has("QuotaReserved") and not self.has("Finished")

    @property
    def is_ended(self) -> bool:
        """Whether nothing is to be written to it any more."""
        return self.has("Finished") or "deletionTimestamp" in self.meta

    @property
    def flavors(self) -> list[str]:
        """The names of the flavors of its admission."""
        assigned = (self.status.get("admission") or {}).get("podSetAssignments") or ()
        return sorted({str(flavor) for each in assigned for flavor in (each.get("flavors") or {}).values()})

    def because(self, kind: str) -> str:
        """Return reason and message of a condition as the end of a sentence."""
        found = condition(self.status, kind)
        reason, message = str(found.get("reason") or ""), str(found.get("message") or "")
        return f" ({reason}): {shorten(message, MAX_TEXT)}" if message else f" ({reason})" if reason else ""

    def patch(self, value: Json, **options: Any) -> Change:
        """Return a change of its spec, or with the options of ``Change`` of other parts."""
        return Change(names.WORKLOADS, self.meta["name"], self.meta["uid"], value, **options)


def desired_pod_set(s: JobState) -> Json:
    """Return what the job asks for, with all its nodes."""
    pod = desired_pods(s.job, 1, s.settings, [0]).first["spec"]
    spec = {key: pod[key] for key in _POD_FIELDS if pod.get(key)}
    for kind in ("initContainers", "containers"):
        if containers := pod.get(kind):
            spec[kind] = [{key: each[key] for key in _CONTAINER_FIELDS if key in each} for each in containers]
    return {"name": POD_SET, "count": s.job.spec.num_nodes, "template": {"metadata": {}, "spec": spec}}


def digest(pod_set: Json) -> str:
    """Return the digest of a podSet as it is sent: the API server adds defaults and drops what it does not know."""
    return _DIGEST_FORM + hashlib.sha256(json.dumps(pod_set, sort_keys=True).encode()).hexdigest()[:16]


def is_outdated(s: JobState, workload: Workload) -> bool:
    """Return whether the Workload has other podSets than the job.

    While quota is reserved, a digest of another release is not compared: an upgrade must not take the quota away.
    """
    recorded = str(workload.annotations.get(names.ANNOTATION_POD_SETS) or "")
    if workload.has("QuotaReserved") and not recorded.startswith(_DIGEST_FORM):
        return False
    return recorded != digest(desired_pod_set(s))


def desired_workload(s: JobState, queue: str, priority: Json) -> Create:
    """Return the Workload. It has no finalizer: it goes with the job that owns it."""
    pod_set, given = desired_pod_set(s), {key: value for key, value in priority.items() if value is not None}
    spec = {"queueName": queue, "active": True, "podSets": [pod_set], **given}
    noted = {names.ANNOTATION_POD_SETS: digest(pod_set)}
    name, labels = names.service_name(s.job.name, s.job.uid), {names.LABEL_QUEUED_UID: s.job.uid}
    return owned_object(s.job, names.WORKLOADS, name, spec, labels=labels, annotations=noted)


def deactivation(s: JobState, workload: Workload, annotations: Json) -> Change:
    """Return what takes the job out of its queue, with these annotations."""
    # Pods of a newer attempt than the recorded one may run: the status was not written, or another operator's was.
    noted = {names.ANNOTATION_SUSPENDED: str(max(s.attempt.number, s.newest_attempt))} | annotations
    version = workload.meta.get("resourceVersion", "")
    return workload.patch({"active": False}, annotations=noted, version=version)


def end_of_job(s: JobState, workload: Workload) -> Change:
    """Return the end of the Workload, which releases its quota."""
    reason = "Failed" if s.before.state == "Failed" else "Succeeded"
    return _status_change(s, workload, Finished=("True", reason, f"DDPJob {s.job.name} has the state {s.before.state}"))


def release(s: JobState, workload: Workload) -> Change:
    """Return the end of an evicted admission: Kueue gives the quota to others, and queues the Workload again."""
    cause = condition(workload.status, "Evicted")
    reason, message = str(cause.get("reason") or "Evicted"), str(cause.get("message") or "")
    changes = {
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        "Requeued": ("True" if reason in _REQUEUED_AT_ONCE else "False", reason, message),
    }
    if condition(workload.status, "PodsReady"):
        changes["PodsReady"] = ("False", "WaitForStart", "Not all pods are ready or succeeded")
    return _status_change(s, workload, {"admission": None}, **changes)


def readiness(s: JobState, workload: Workload, number: int, *, runs: bool) -> Change | None:
    """Return the condition PodsReady, by which Kueue evicts jobs that do not start, or do not recover, in time."""
    running = {rank for rank, pod in s.current.items() if pod.state == "running"} | s.succeeded_nodes
    is_ready = runs and number == s.attempt.number and running.issuperset(s.job.node_ranks)
    known = condition(workload.status, "PodsReady")
    if is_ready == (known.get("status") == "True"):
        return None
    recovery = "Recovered" if known.get("reason") in _RECOVERY else "Started"
    waits = ("False", "WaitForRecovery", "At least one pod has failed, waiting for recovery")
    return _status_change(s, workload, PodsReady=("True", recovery, "All pods run") if is_ready else waits)


def _status_change(
    s: JobState, workload: Workload, value: Json | None = None, **conditions: tuple[str, str, str]
) -> Change:
    """Return a patch of the status. It replaces the list of conditions, so the Workload must not have changed since.

    value: other fields. conditions: status, reason and message by type.
    """
    meta = workload.meta
    built = {str(each["type"]): each for each in workload.status.get("conditions") or ()}
    for kind, (status, reason, message) in conditions.items():
        before = built.get(kind, {})
        built[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": int(meta.get("generation") or 0),
            "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else timestamp(s.now),
        }
    whole = (value or {}) | {"conditions": [*built.values()]}
    return workload.patch(whole, part="status", version=meta["resourceVersion"])
