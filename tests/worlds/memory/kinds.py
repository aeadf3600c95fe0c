"""The six kinds that the in-memory cluster serves: how each is read, completed with defaults, and checked.

``server`` calls the methods of ``Kind`` in the order of the real request handlers. Nothing here knows what is stored.
Defaults of pods: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/. Of admission, only the
default tolerations, priority and service account are here.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.spec import NAME_RULE, DDPJobSpec, forbidden_changes, is_job_name
from ddpjob.api.status import DDPJobStatus
from tests.worlds.memory import validation
from tests.worlds.memory.api_errors import Cause, bad_request, invalid_patch, undecodable
from tests.worlds.memory.decoding import Findings, causes, read_core, read_custom

CLAIM_PROTECTION = "kubernetes.io/pvc-protection"

_DEFAULT_MODE = 0o644
_NODE_LOSS_SECONDS = 300
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_STATUS_LISTS = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")


class Kind:
    """A kind whose types are Kubernetes' own. Objects passed in may be changed in place unless said otherwise.

    model: the kind's name among the official client's models.
    is_core: whether finalizers must be qualified, as in Kubernetes' own kinds.
    returns_deleted: whether DELETE returns the object, not a Status, when the object is removed at once.
    needs_version: whether an update must contain the version that it changes.
    """

    resource: Resource
    model: str
    is_name: Callable[[str], bool] = staticmethod(validation.is_dns_subdomain)
    is_core = True
    has_status = True
    has_generation = False
    returns_deleted = True
    needs_version = False

    def read_new(self, body: Json) -> Json:
        """Return the object that a POST creates, with the schema's defaults. Raises ``Invalid`` (400)."""
        findings = Findings()
        obj = self.read(body, {}, findings)
        if findings:
            raise undecodable(self.resource, str(findings))
        return obj

    def read_patched(self, merged: Json, old: Json) -> Json:
        """Return the object that a patch makes of ``old``, with the schema's defaults. Raises ``Invalid`` (422)."""
        findings = Findings()
        obj = self.read(merged, old, findings)
        if findings:
            raise invalid_patch(str(findings))
        return obj

    def read(self, body: Json, old: Json, findings: Findings) -> Json:
        """Decode a body. A part that is the very same object as in ``old`` was decoded before and is kept."""
        kind, version = body.get("kind") or self.resource.kind, body.get("apiVersion") or self.resource.api_version
        if (kind, version) != (self.resource.kind, self.resource.api_version):
            raise bad_request(f"{version}, Kind={kind} cannot be handled as a {self.resource.kind}")
        changed = {key: value for key, value in body.items() if key not in old or old[key] is not value}
        obj = {key: value for key, value in body.items() if key not in changed}
        obj |= read_core(self.model, changed, "", findings)
        obj |= {"apiVersion": self.resource.api_version, "kind": self.resource.kind}
        if not findings:
            obj["metadata"] = tidied_metadata(obj.get("metadata", {}))
            self.fill_in(obj)
        return obj

    def fill_in(self, obj: Json) -> None:
        """Set the schema's defaults. They hold after every write."""

    def prepare_create(self, obj: Json) -> None:
        """Set what the API server decides about a new object: admission's defaults and the initial status."""
        if self.has_generation:
            obj["metadata"]["generation"] = 1

    def check_create(self, obj: Json) -> list[Cause]:
        """Return what is wrong with a new object."""
        return list(validation.check_new_metadata(obj["metadata"], self.is_name, is_core=self.is_core))

    def prepare_update(self, new: Json, old: Json) -> None:
        """Restore what a write to the main resource cannot change."""
        if self.has_status:
            restore(new, old, "status")
        if self.has_generation:
            changed = new.get("spec") != old.get("spec")
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + changed

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        """Return what is wrong with an update of the main resource."""
        return list(validation.check_changed_metadata(new["metadata"], old["metadata"], is_core=self.is_core))

    def prepare_status(self, new: Json, old: Json) -> None:
        """Restore what a write to the status cannot change."""
        restore(new, old, "spec")
        restore(new["metadata"], old["metadata"], "ownerReferences")

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        """Return what is wrong with a write to the status."""
        return list(validation.check_changed_metadata(new["metadata"], old["metadata"], is_core=self.is_core))

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        """Return how long a deleted object keeps running, or None for a kind without graceful deletion."""
        del obj, requested
        return None


class Jobs(Kind):
    """DDPJobs, a custom resource: checked by the models of ``ddpjob.api``, from which the CRD is generated."""

    resource = names.DDPJOBS
    is_core = False
    has_generation = True
    returns_deleted = False
    needs_version = True

    _PARTS: ClassVar[Mapping[str, type[WireModel]]] = {"spec": DDPJobSpec, "status": DDPJobStatus}

    def __init__(self) -> None:
        # The spec and the status that were last read and found valid: checking them once is enough.
        self._valid: Json = {}

    def read_new(self, body: Json) -> Json:
        if not body.get("kind") or body.get("apiVersion") != self.resource.api_version:
            raise bad_request(f"the object must have a kind and the API version {self.resource.api_version}")
        return super().read_new(body)

    def read(self, body: Json, old: Json, findings: Findings) -> Json:
        obj: Json = {}
        for key, value in body.items():
            if key not in ("apiVersion", "kind", "metadata", *self._PARTS):
                findings.unknown.append(key)
            elif key in old and old[key] is value:
                obj[key] = value
            elif key == "metadata":
                obj[key] = read_core("V1ObjectMeta", value or {}, key, findings)
            elif key in self._PARTS and value is not None:
                obj[key], is_valid = read_custom(self._PARTS[key], value, key, findings)
                if is_valid:
                    self._valid[key] = obj[key]
            elif value is not None:
                obj[key] = value
        if not findings:
            obj["metadata"] = tidied_metadata(obj.get("metadata", {}))
        return obj

    def prepare_create(self, obj: Json) -> None:
        super().prepare_create(obj)
        obj.pop("status", None)

    def check_create(self, obj: Json) -> list[Cause]:
        return self._check_identity(obj) or self._with_rules(super().check_create(obj), obj, None)

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        if (found := self._check_identity(new)) or new.get("spec") == old.get("spec"):
            return found or super().check_update(new, old)
        return self._with_rules(super().check_update(new, old), new, old)

    def prepare_status(self, new: Json, old: Json) -> None:
        kept = old | {key: new[key] for key in ("apiVersion", "kind", "status") if key in new}
        if "status" not in new:
            kept.pop("status", None)
        new.clear()
        new |= kept

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        if found := self._check_identity(new):
            return found
        return self._check_part("status", new["status"]) if "status" in new else []

    def _check_identity(self, obj: Json) -> list[Cause]:
        """Check kind and version: a patch of a custom resource may contain others."""
        expected = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
        return [Cause(key, f"must be {value}") for key, value in expected.items() if obj.get(key) != value]

    def _with_rules(self, found: list[Cause], new: Json, old: Json | None) -> list[Cause]:
        """Return ``found`` with what is wrong with the spec, its change and the job's name."""
        found += self._check_part("spec", new["spec"]) if "spec" in new else [Cause("spec", "required")]
        if found:
            return found
        messages = forbidden_changes(old["spec"], new["spec"]) if old is not None else []
        found += [Cause("spec", message) for message in messages]
        if not is_job_name(new["metadata"]["name"]):
            # A rule on the whole object, whose path is <nil>.
            found.append(Cause("<nil>", NAME_RULE.message))
        return found

    def _check_part(self, key: str, value: Any) -> list[Cause]:
        return [] if value is self._valid.get(key) else causes(self._PARTS[key], value, key)


class Pods(Kind):
    """Pods: their admission, their live changes, and their graceful deletion."""

    resource = names.PODS
    model = "V1Pod"
    has_generation = True

    def fill_in(self, obj: Json) -> None:
        obj["spec"] = _spec_defaults(obj.get("spec", {}))
        obj["status"] = _status_defaults(obj.get("status", {}))

    def prepare_create(self, obj: Json) -> None:
        super().prepare_create(obj)
        spec: Json = obj["spec"]
        obj["status"] = {"phase": "Pending", "qosClass": _qos_class(spec)}
        account = spec.get("serviceAccountName", "default")
        spec |= {"serviceAccountName": account, "serviceAccount": account}
        spec.setdefault("priority", 0)
        spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
        _tolerate_node_loss(spec)

    def check_create(self, obj: Json) -> list[Cause]:
        return [*super().check_create(obj), *validation.check_pod_spec(obj["spec"])]

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_update(new, old), *validation.check_pod_update(new["spec"], old["spec"])]

    def prepare_status(self, new: Json, old: Json) -> None:
        super().prepare_status(new, old)
        restore(new["metadata"], old["metadata"], "deletionTimestamp")
        for key in ("qosClass", "observedGeneration"):
            if key in old["status"]:
                new["status"].setdefault(key, old["status"][key])

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_status(new, old), *validation.check_pod_status(new, old)]

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        seconds = obj["spec"]["terminationGracePeriodSeconds"] if requested is None else requested
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
            return 0  # no kubelet has it, or no container of it runs
        return 1 if seconds < 0 else int(seconds)


class Services(Kind):
    """Headless Services. No addresses are assigned."""

    resource = names.SERVICES
    model = "V1Service"
    is_name = staticmethod(validation.is_dns_1035_label)

    def fill_in(self, obj: Json) -> None:
        spec: Json = {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
        spec |= obj.get("spec", {})
        if "ports" in spec:
            spec["ports"] = [{"protocol": "TCP", "targetPort": port.get("port", 0)} | port for port in spec["ports"]]
        obj["spec"] = spec
        obj["status"] = {"loadBalancer": {}} | obj.get("status", {})

    def prepare_create(self, obj: Json) -> None:
        spec = obj["spec"]
        obj["status"] = {"loadBalancer": {}}
        if "clusterIP" in spec:
            spec.setdefault("clusterIPs", [spec["clusterIP"]])
            spec.setdefault("ipFamilyPolicy", "SingleStack")
            spec.setdefault("ipFamilies", ["IPv4"])

    def check_create(self, obj: Json) -> list[Cause]:
        return [*super().check_create(obj), *validation.check_service(obj["spec"])]


class NetworkPolicies(Kind):
    """NetworkPolicies. Nothing enforces them."""

    resource = names.NETWORK_POLICIES
    model = "V1NetworkPolicy"
    has_status = False
    has_generation = True
    returns_deleted = False

    def fill_in(self, obj: Json) -> None:
        spec: Json = {"podSelector": {}} | obj.get("spec", {})
        for rules in ("ingress", "egress"):
            if rules in spec:
                spec[rules] = [_rule_defaults(rule) for rule in spec[rules]]
        if not spec.get("policyTypes"):
            spec["policyTypes"] = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
        obj["spec"] = spec


class Claims(Kind):
    """PersistentVolumeClaims. They are never bound. A finalizer keeps a claim that a placed pod uses."""

    resource = names.CLAIMS
    model = "V1PersistentVolumeClaim"

    def fill_in(self, obj: Json) -> None:
        obj["spec"] = {"volumeMode": "Filesystem", "resources": {}} | obj.get("spec", {})
        obj["status"] = {"phase": "Pending"} | obj.get("status", {})

    def prepare_create(self, obj: Json) -> None:
        obj["status"] = {"phase": "Pending"}
        finalizers = obj["metadata"].get("finalizers", [])
        if CLAIM_PROTECTION not in finalizers:
            obj["metadata"]["finalizers"] = [*finalizers, CLAIM_PROTECTION]

    def check_create(self, obj: Json) -> list[Cause]:
        return [*super().check_create(obj), *validation.check_claim(obj["spec"])]

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        found = super().check_update(new, old)
        if new["spec"] != old["spec"]:
            found.append(Cause("spec", validation.IMMUTABLE))
        return found


class Events(Kind):
    """core/v1 Events. They never expire here."""

    resource = names.EVENTS
    is_core = False
    model = "CoreV1Event"
    is_name = staticmethod(validation.is_path_segment)
    has_status = False
    returns_deleted = False

    def fill_in(self, obj: Json) -> None:
        always: Json = {"eventTime": None, "firstTimestamp": None, "lastTimestamp": None, "source": {}}
        always |= {"involvedObject": {}, "reportingComponent": "", "reportingInstance": ""}
        for key, value in always.items():
            obj.setdefault(key, value)


def restore(new: Json, old: Json, key: str) -> None:
    """Set ``new[key]`` back to what it is in ``old``."""
    new.pop(key, None)
    if key in old:
        new[key] = old[key]


def tidied_metadata(meta: Json) -> Json:
    """Return metadata without the bookkeeping of field managers and without repeated owner references."""
    out = {key: value for key, value in meta.items() if key != "managedFields"}
    references = out.get("ownerReferences")
    if references is not None:
        out["ownerReferences"] = [ref for index, ref in enumerate(references) if ref not in references[:index]]
    return out


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
            out[kind] = [_container_defaults(container) for container in spec[kind]]
    if "volumes" in spec:
        out["volumes"] = [_volume_defaults(volume) for volume in spec["volumes"]]
    return out


def _container_defaults(container: Json) -> Json:
    out: Json = {
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": _pull_policy(container.get("image", "")),
    } | container
    out["resources"] = _requests_from_limits(out["resources"])
    if "ports" in out:
        out["ports"] = [{"protocol": "TCP"} | port for port in out["ports"]]
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


def _rule_defaults(rule: Json) -> Json:
    ports = [{"protocol": "TCP"} | port for port in rule.get("ports", ())]
    return rule | {"ports": ports} if ports else rule


def _env_defaults(variable: Json) -> Json:
    source = variable.get("valueFrom", {})
    if "fieldRef" in source:
        return variable | {"valueFrom": source | {"fieldRef": {"apiVersion": "v1"} | source["fieldRef"]}}
    return variable


def _volume_defaults(volume: Json) -> Json:
    out = dict(volume)
    if not volume.keys() - {"name"}:
        out["emptyDir"] = {}
    for source in ("configMap", "secret", "downwardAPI", "projected"):
        if source in out:
            out[source] = {"defaultMode": _DEFAULT_MODE} | out[source]
    return out


def _tolerate_node_loss(spec: Json) -> None:
    """Add the tolerations of the DefaultTolerationSeconds plugin to a pod that has none for lost nodes."""
    tolerations: list[Json] = spec.get("tolerations", [])
    added = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_LOSS_SECONDS}
        for taint in _NODE_TAINTS
        if not any(t.get("key", taint) == taint and t.get("effect", "NoExecute") == "NoExecute" for t in tolerations)
    ]
    if tolerations or added:
        spec["tolerations"] = [*tolerations, *added]


def _qos_class(spec: Json) -> str:
    """Return a pod's QoS class: https://kubernetes.io/docs/concepts/workloads/pods/pod-qos/."""
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
    """Add the empty values that Go writes for fields that are never left out."""
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
