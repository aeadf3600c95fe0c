"""Services, claims and events: what the API server fills in and refuses, as far as this project writes them."""

from collections.abc import Iterator

from ddpjob.api import names
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory.answers import Cause, duplicate, forbidden, required, unsupported, wrong
from ddpjob.cluster.memory.formats import is_dns_1035_label, is_path_segment
from ddpjob.cluster.memory.kinds import Kind
from ddpjob.cluster.memory.metadata import labels
from ddpjob.cluster.memory.quantities import amount

CLAIM_PROTECTION = "kubernetes.io/pvc-protection"

_SERVICE_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
_AFFINITIES = ("ClientIP", "None")
_PROTOCOLS = ("SCTP", "TCP", "UDP")
_ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
_VOLUME_MODES = ("Block", "Filesystem")


class Services(Kind):
    """Headless Services: nothing here hands out addresses."""

    resource = names.SERVICES
    model = "V1Service"
    is_name = staticmethod(is_dns_1035_label)
    name_rule = "a DNS-1035 label must consist of lower case letters, digits or '-', and start with a letter"

    def fill_in(self, obj: Json) -> None:
        spec: Json = {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}
        spec |= obj.get("spec", {})
        if "ports" in spec:
            spec["ports"] = [{"protocol": "TCP", "targetPort": port.get("port", 0)} | port for port in spec["ports"]]
        if spec["sessionAffinity"] == "ClientIP":
            spec.setdefault("sessionAffinityConfig", {"clientIP": {"timeoutSeconds": 10800}})
        obj["spec"] = spec
        obj["status"] = {"loadBalancer": {}} | obj.get("status", {})

    def prepare_create(self, obj: Json) -> None:
        spec = obj["spec"]
        obj["status"] = {"loadBalancer": {}}
        if "clusterIP" in spec:
            spec.setdefault("clusterIPs", [spec["clusterIP"]])
        if spec.get("clusterIP") == "None":
            # Without a selector somebody else makes the endpoints, of whichever family.
            both = not spec.get("selector")
            spec.setdefault("ipFamilyPolicy", "RequireDualStack" if both else "SingleStack")
            spec.setdefault("ipFamilies", ["IPv4", "IPv6"] if both else ["IPv4"])

    def check_create(self, obj: Json) -> list[Cause]:
        return [*super().check_create(obj), *_service(obj["spec"])]

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        found = [*super().check_update(new, old), *_service(new["spec"])]
        if new["spec"].get("clusterIP") != old["spec"].get("clusterIP"):
            found.append(wrong("spec.clusterIPs[0]", new["spec"].get("clusterIP"), "may not change once set"))
        return found


class Claims(Kind):
    """PersistentVolumeClaims. Nothing here binds them; a finalizer keeps one that a placed pod uses."""

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
        return [*super().check_create(obj), *_claim(obj["spec"])]

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        found = super().check_update(new, old)
        if new["spec"] != old["spec"]:
            found.append(
                forbidden("spec", "spec is immutable after creation except resources.requests of bound claims")
            )
        return found


class Events(Kind):
    """core/v1 Events. They never expire here."""

    resource = names.EVENTS
    is_core = False
    model = "CoreV1Event"
    is_name = staticmethod(is_path_segment)
    name_rule = "may not be '.' or '..' and not contain '/' or '%'"
    has_status = False
    returns_deleted = False

    def fill_in(self, obj: Json) -> None:
        always: Json = {"eventTime": None, "firstTimestamp": None, "lastTimestamp": None, "source": {}}
        always |= {"involvedObject": {}, "reportingComponent": "", "reportingInstance": ""}
        for key, value in always.items():
            obj.setdefault(key, value)

    def check_create(self, obj: Json) -> list[Cause]:
        return [*self._place(obj)] or super().check_create(obj)

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_update(new, old), *self._place(new)]

    def _place(self, obj: Json) -> Iterator[Cause]:
        if obj["involvedObject"].get("namespace", "") != obj["metadata"]["namespace"]:
            yield wrong(
                "involvedObject.namespace", obj["involvedObject"].get("namespace", ""), "does not match namespace"
            )


def _service(spec: Json) -> Iterator[Cause]:
    if spec["type"] not in _SERVICE_TYPES:
        yield unsupported("spec.type", spec["type"], _SERVICE_TYPES)
    if spec["sessionAffinity"] not in _AFFINITIES:
        yield unsupported("spec.sessionAffinity", spec["sessionAffinity"], _AFFINITIES)
    if spec.get("clusterIP") != "None":
        if not spec.get("ports"):
            yield required("spec.ports")
        yield wrong("spec.clusterIP", spec.get("clusterIP", ""), "only headless Services (None) exist in memory")
    yield from labels(spec.get("selector", {}), "spec.selector")
    ports: list[Json] = spec.get("ports", [])
    names_seen: set[str] = set()
    numbers: set[tuple[int, str]] = set()
    for index, port in enumerate(ports):
        path, name, number = f"spec.ports[{index}]", port.get("name", ""), port.get("port", 0)
        if not name and len(ports) > 1:
            yield required(f"{path}.name")
        elif name and name in names_seen:
            yield duplicate(f"{path}.name", name)
        for key, value in (("port", number), ("targetPort", port["targetPort"])):
            if isinstance(value, int) and not 1 <= value <= 65535:
                yield wrong(f"{path}.{key}", value, "must be between 1 and 65535, inclusive")
        if port["protocol"] not in _PROTOCOLS:
            yield unsupported(f"{path}.protocol", port["protocol"], _PROTOCOLS)
        if (number, port["protocol"]) in numbers:
            yield duplicate(path, number)
        names_seen.add(name)
        numbers.add((number, port["protocol"]))


def _claim(spec: Json) -> Iterator[Cause]:
    modes: list[str] = spec.get("accessModes", [])
    if not modes:
        yield required("spec.accessModes", "Required value: at least 1 access mode is required")
    for mode in modes:
        if mode not in _ACCESS_MODES:
            yield unsupported("spec.accessModes", mode, _ACCESS_MODES)
    if "ReadWriteOncePod" in modes and len(modes) > 1:
        yield forbidden("spec.accessModes", "may not use ReadWriteOncePod with other access modes")
    if spec["volumeMode"] not in _VOLUME_MODES:
        yield unsupported("spec.volumeMode", spec["volumeMode"], _VOLUME_MODES)
    storage = spec["resources"].get("requests", {}).get("storage")
    if storage is None:
        yield required("spec.resources[storage]")
    elif amount(storage) <= 0:
        yield wrong("spec.resources[storage]", storage, "must be greater than zero")
    yield from labels(spec.get("selector", {}).get("matchLabels", {}), "spec.selector.matchLabels")
