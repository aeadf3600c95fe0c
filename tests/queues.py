"""Kueue for tests: minimal definitions of its kinds, and a queue that the test runs cycle by cycle.

It does what plans depend on, as Kueue 0.19 does it: admission by priority and age within a quota of pods, preemption,
deactivation, and the end of a reservation. ``tests/controller/real_kueue.py`` runs Kueue itself.
"""

from collections.abc import Callable
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition, is_true
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane
from tests.worlds.custom_resources import custom_resource

FLAVOR = "spot"
CLASS = "urgent"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_TIME = "2026-01-01T00:00:00Z"
_KINDS = ((names.WORKLOADS, "Namespaced"), (names.FLAVORS, "Cluster"), (names.WORKLOAD_PRIORITIES, "Cluster"))


def install(plane: ControlPlane) -> None:
    """Serve the kinds of Kueue, with a flavor and a priority class."""
    for kind, scope in _KINDS:
        plane.request("POST", _CRDS, _definition(kind, scope))
    flavor = {"nodeLabels": {"pool": FLAVOR}, "tolerations": [{"key": "pool", "operator": "Exists"}]}
    for kind, body in (
        (names.FLAVORS, {"metadata": {"name": FLAVOR}, "spec": flavor}),
        (names.WORKLOAD_PRIORITIES, {"metadata": {"name": CLASS}, "value": 100}),
    ):
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        eventually(f"{kind.kind} is served", lambda kind=kind, whole=whole: _is_created(plane, kind, whole))
    eventually("Workloads are served", lambda: _is_listed(plane))


def uninstall(plane: ControlPlane) -> None:
    """Remove the kinds, and all objects with them."""
    for kind, _ in _KINDS:
        eventually(
            f"{kind.plural} are gone", lambda kind=kind: _is_gone(plane, f"{_CRDS}/{kind.plural}.kueue.x-k8s.io")
        )


def _is_gone(plane: ControlPlane, path: str) -> bool:
    try:
        plane.request("DELETE", path)
    except ApiError as error:
        return error.status == 404
    return False


def _is_listed(plane: ControlPlane) -> bool:
    try:
        plane.request("GET", f"/{names.WORKLOADS.path()}")
    except ApiError:  # 404, and 429 until the API server has listed them itself
        return False
    return True


def _is_created(plane: ControlPlane, kind: Resource, body: Json) -> bool:
    try:
        plane.request("POST", f"/{kind.path()}", body)
    except ApiError as error:  # 404, and 429 until the API server has listed them itself
        return error.status == 409
    return True


def _definition(kind: Resource, scope: str) -> Json:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    anything: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if kind is names.WORKLOADS:
        # As in Kueue: what the schema does not declare is dropped, such as a field of a newer release of Kubernetes.
        container = {"type": "object", "properties": {"name": {"type": "string"}, "resources": anything}}
        containers = {"type": "array", "items": container}
        pod = {"type": "object", "properties": {"containers": containers, "nodeSelector": anything}}
        template = {"type": "object", "properties": {"metadata": anything, "spec": pod}}
        count = {"type": "integer", "default": 1}
        pod_set = {"type": "object", "properties": {"name": {"type": "string"}, "count": count, "template": template}}
        spec = {
            "queueName": {"type": "string"},
            "active": {"type": "boolean", "default": True},
            "priority": {"type": "integer"},
            "priorityClassRef": anything,
            "podSets": {"type": "array", "items": pod_set},
        }
        schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": spec}, "status": anything}}
    approved = "kueue/pull/1113"
    return custom_resource(kind, schema, approved, scope=scope, has_status=kind is names.WORKLOADS)


class Queue:
    """One LocalQueue with a quota of pods."""

    def __init__(self, plane: ControlPlane, namespace: str, quota: int) -> None:
        self._plane = plane
        self._path = f"/{names.WORKLOADS.path(namespace)}"
        self._quota = quota

    def workloads(self) -> list[Json]:
        """Return the Workloads in the order of the queue: by priority and age."""
        found = self._plane.request("GET", self._path)["items"]
        return sorted(found, key=lambda w: (-w["spec"]["priority"], w["metadata"]["creationTimestamp"]))

    def of(self, job: str) -> Json:
        """Return the Workload of a job; {} if there is none."""
        return next((w for w in self.workloads() if w["metadata"]["labels"][names.LABEL_JOB_NAME] == job), {})

    def condition(self, job: str, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition of a job's Workload."""
        found = condition(self.of(job).get("status"), kind)
        return str(found.get("status") or ""), str(found.get("reason") or "")

    def cycle(self) -> None:
        """Admit what fits, evict what was deactivated, and for what does not fit the last of lower priority."""
        _repeated(self._cycle)

    def preempt(self, job: str) -> None:
        """Evict the job, as for another one."""
        _repeated(lambda: self.evict(self.of(job), "Preempted"))

    def _cycle(self) -> None:
        for workload in self.workloads():
            status, spec = workload.get("status") or {}, workload["spec"]
            if is_true(status, "Finished") or (is_true(status, "Evicted") and is_true(status, "QuotaReserved")):
                continue
            if not spec["active"]:
                if is_true(status, "QuotaReserved"):
                    self.evict(workload, "Deactivated")
            elif not is_true(status, "QuotaReserved"):
                self._admit_or_preempt(workload)

    def _admit_or_preempt(self, workload: Json) -> None:
        reserved = [w for w in self.workloads() if is_true(w.get("status"), "QuotaReserved") and not _is_finished(w)]
        if sum(map(_count, reserved)) + _count(workload) <= self._quota:
            assigned = {"name": "main", "flavors": {"cpu": FLAVOR}}
            admission = {"clusterQueue": "all", "podSetAssignments": [assigned]}
            reasons = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
            self._set(workload, {"admission": admission}, Evicted=("False", "QuotaReserved"), **reasons)
            return
        lower = [w for w in reserved if w["spec"]["priority"] < workload["spec"]["priority"]]
        if lower and not is_true(lower[-1]["status"], "Evicted"):
            self.evict(lower[-1], "Preempted")
        self._set(workload, {}, QuotaReserved=("False", "Pending"))

    def evict(self, workload: Json, reason: str) -> None:
        self._set(workload, {}, Evicted=("True", reason))

    def _set(self, workload: Json, status: Json, **conditions: tuple[str, str]) -> None:
        """Change status and conditions, unless they are so already."""
        known = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or ()}
        if not status and all(known.get(k, {}).get("reason") == reason for k, (_, reason) in conditions.items()):
            return
        for kind, (value, reason) in conditions.items():
            message = f"{reason} by the queue of the test"
            known[kind] = {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "lastTransitionTime": _TIME,
            }
        version = {"resourceVersion": workload["metadata"]["resourceVersion"]}
        body = {"metadata": version, "status": status | {"conditions": [*known.values()]}}
        self._plane.request("PATCH", f"{self._path}/{workload['metadata']['name']}/status", body)


def _repeated(write: Callable[[], None]) -> None:
    """Write again as long as the operator writes the same Workload at the same time."""
    while True:
        try:
            return write()
        except ApiError as error:
            if error.status != 409:
                raise


def _count(workload: Json) -> int:
    return int(workload["spec"]["podSets"][0]["count"])


def _is_finished(workload: dict[str, Any]) -> bool:
    return is_true(workload.get("status"), "Finished")
