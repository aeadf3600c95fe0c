"""Pods: the defaults of schema and admission, what may change later, and how long a deleted one goes on.

The schema's defaults follow https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/; of
admission there are the default tolerations, priority and service account. No token volume is mounted.
"""

from typing import Any

from ddpjob.api import names
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import podchecks
from ddpjob.cluster.memory.answers import Cause
from ddpjob.cluster.memory.kinds import Kind, keep

_DEFAULT_MODE = 0o644
_NODE_LOSS_SECONDS = 300
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_STATUS_LISTS = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


class Pods(Kind):
    resource = names.PODS
    model = "V1Pod"
    has_generation = True

    def fill_in(self, obj: Json) -> None:
        obj["spec"] = _spec_defaults(obj.get("spec", {}))
        obj["status"] = _status_defaults(obj.get("status", {}))

    def prepare_create(self, obj: Json) -> None:
        spec: Json = obj["spec"]
        obj["metadata"]["generation"] = 1
        obj["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}
        account = spec.get("serviceAccountName", "default")
        spec |= {"serviceAccountName": account, "serviceAccount": account}
        spec.setdefault("priority", 0)
        spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
        _tolerate_node_loss(spec)

    def check_create(self, obj: Json) -> list[Cause]:
        return [*super().check_create(obj), *podchecks.of_spec(obj["spec"])]

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_update(new, old), *podchecks.of_update(new["spec"], old["spec"])]

    def prepare_status(self, new: Json, old: Json) -> None:
        super().prepare_status(new, old)
        keep(new["metadata"], old["metadata"], "deletionTimestamp")
        if "qosClass" in old["status"]:
            new["status"].setdefault("qosClass", old["status"]["qosClass"])

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_status(new, old), *podchecks.of_status(new, old)]

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        seconds = obj["spec"]["terminationGracePeriodSeconds"] if requested is None else requested
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
            return 0  # there is no kubelet, or nothing left for it to end
        return 1 if seconds < 0 else int(seconds)


def _spec_defaults(spec: Json) -> Json:
    out: Json = {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
    } | spec
    if out["terminationGracePeriodSeconds"] < 0:
        out["terminationGracePeriodSeconds"] = 1
    account = spec.get("serviceAccountName") or spec.get("serviceAccount")
    if account:
        out |= {"serviceAccountName": account, "serviceAccount": account}
    for kind in ("initContainers", "containers"):
        if kind in spec:
            out[kind] = [_container_defaults(container, spec) for container in spec[kind]]
    if "volumes" in spec:
        out["volumes"] = [_volume_defaults(volume) for volume in spec["volumes"]]
    return out


def _container_defaults(container: Json, spec: Json) -> Json:
    out: Json = {
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": _pull_policy(container.get("image", "")),
    } | container
    out["resources"] = _requests_from_limits(out["resources"])
    if "ports" in out:
        out["ports"] = [_port_defaults(port, spec) for port in out["ports"]]
    if "env" in out:
        out["env"] = [_env_defaults(variable) for variable in out["env"]]
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe in out:
            out[probe] = _PROBE | out[probe]
            if "httpGet" in out[probe]:
                out[probe]["httpGet"] = {"path": "/", "scheme": "HTTP"} | out[probe]["httpGet"]
    return out


def _pull_policy(image: str) -> str:
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    return "IfNotPresent" if tag not in ("", "latest") or (digest and not tag) else "Always"


def _requests_from_limits(resources: Json) -> Json:
    limits = resources.get("limits", {})
    if not limits:
        return resources
    return resources | {"requests": limits | resources.get("requests", {})}


def _port_defaults(port: Json, spec: Json) -> Json:
    out = {"protocol": "TCP"} | port
    if spec.get("hostNetwork") and "containerPort" in out:
        out.setdefault("hostPort", out["containerPort"])
    return out


def _env_defaults(variable: Json) -> Json:
    source = variable.get("valueFrom", {})
    if "fieldRef" in source:
        return variable | {"valueFrom": source | {"fieldRef": {"apiVersion": "v1"} | source["fieldRef"]}}
    if "resourceFieldRef" in source:
        return variable | {"valueFrom": source | {"resourceFieldRef": {"divisor": "0"} | source["resourceFieldRef"]}}
    return variable


def _volume_defaults(volume: Json) -> Json:
    out = dict(volume)
    if not volume.keys() - {"name"}:
        out["emptyDir"] = {}
    for source in ("configMap", "secret", "downwardAPI", "projected"):
        if source in out:
            out[source] = {"defaultMode": _DEFAULT_MODE} | out[source]
    if "hostPath" in out:
        out["hostPath"] = {"type": ""} | out["hostPath"]
    return out


def _tolerate_node_loss(spec: Json) -> None:
    """What the DefaultTolerationSeconds plugin adds where the pod says nothing about lost nodes."""
    tolerations: list[Json] = spec.get("tolerations", [])
    added = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_LOSS_SECONDS}
        for taint in _NODE_TAINTS
        if not any(t.get("key", taint) == taint and t.get("effect", "NoExecute") == "NoExecute" for t in tolerations)
    ]
    if tolerations or added:
        spec["tolerations"] = [*tolerations, *added]


def qos_class(spec: Json) -> str:
    """https://kubernetes.io/docs/concepts/workloads/pods/pod-qos/."""
    containers: list[Json] = [*spec.get("containers", []), *spec.get("initContainers", [])]
    resources = [container.get("resources", {}) for container in containers]
    named = {name for r in resources for part in ("limits", "requests") for name in r.get(part, {})}
    if not named & {"cpu", "memory"}:
        return "BestEffort"
    full = all(
        r.get("limits", {}).get(name) is not None and r["limits"][name] == r.get("requests", {}).get(name)
        for r in resources
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if full else "Burstable"


def _status_defaults(status: Json) -> Json:
    """What Go writes out although it was never said: the empty values of fields that are always there."""
    out = dict(status)
    if out.get("podIP") and out.get("podIPs", [{}])[0].get("ip") != out["podIP"]:
        out["podIPs"] = [{"ip": out["podIP"]}]
    elif out.get("podIPs"):
        out["podIP"] = out["podIPs"][0].get("ip", "")
    if "conditions" in out:
        times = {"lastProbeTime": None, "lastTransitionTime": None}
        out["conditions"] = [{"type": "", "status": ""} | times | condition for condition in out["conditions"]]
    for key in _STATUS_LISTS:
        if key in out:
            out[key] = [_container_status_defaults(container) for container in out[key]]
    return out


def _container_status_defaults(status: Json) -> Json:
    absent: dict[str, Any] = {"name": "", "state": {}, "lastState": {}, "ready": False, "restartCount": 0}
    out = absent | {"image": "", "imageID": ""} | status
    return out | {key: _state_defaults(out[key]) for key in ("state", "lastState")}


def _state_defaults(state: Json) -> Json:
    out = dict(state)
    if "running" in out:
        out["running"] = {"startedAt": None} | out["running"]
    if "terminated" in out:
        out["terminated"] = {"exitCode": 0, "startedAt": None, "finishedAt": None} | out["terminated"]
    return out
