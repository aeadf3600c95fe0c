"""Checks of objects as the API server makes them: names, labels, metadata, pods, services, policies and claims.

Each check yields a ``Cause`` for everything that is wrong. Of pods it covers what a rendered or hand-written DDPJob
template can get wrong; other pod fields are checked only for their types, in ``decoding``.
Names, labels: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpjob.api.objects import Json
from ddpjob.api.quantities import amount
from tests.worlds.memory.api_errors import Cause, duplicate, forbidden, invalid_value, required, unsupported

MAX_LABEL = 63
MAX_SUBDOMAIN = 253
MAX_ANNOTATION_BYTES = 256 * 1024
_MAX_INT32 = 2**31 - 1

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_ENV_NAME = re.compile(r"[ -<>-~]+")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")

_LABEL_RULE = "a lowercase RFC 1123 label must consist of lower case letters, digits and '-'"
_QUALIFIED_NAME_RULE = "must be a qualified name: [prefix/]name"

_CORE_FINALIZERS = frozenset({"kubernetes", "orphan", "foregroundDeletion"})
_PROTOCOLS = ("SCTP", "TCP", "UDP")
_POD_ENUMS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
}
_CONTAINER_ENUMS = {
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
}
_SERVICE_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
_POLICY_TYPES = ("Egress", "Ingress")
_SELECTOR_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_AFFINITIES = ("ClientIP", "None")
_ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
_VOLUME_MODES = ("Block", "Filesystem")


def is_dns_label(value: str) -> bool:
    """Return whether a text is an RFC 1123 label: the name of a container, a host or a namespace."""
    return len(value) <= MAX_LABEL and _LABEL.fullmatch(value) is not None


def is_dns_1035_label(value: str) -> bool:
    """Return whether a text is an RFC 1035 label: the name of a Service."""
    return len(value) <= MAX_LABEL and _LABEL_1035.fullmatch(value) is not None


def is_dns_subdomain(value: str) -> bool:
    """Return whether a text is an RFC 1123 subdomain: the name of most objects."""
    return len(value) <= MAX_SUBDOMAIN and _SUBDOMAIN.fullmatch(value) is not None


def is_path_segment(value: str) -> bool:
    """Return whether a text is one segment of a URL's path, which every name must be."""
    return value not in (".", "..") and not set("/%") & set(value)


def is_qualified_name(value: str) -> bool:
    """Return whether a text is ``[prefix/]name``: the key of a label or annotation, or a finalizer."""
    prefix, slash, name = value.rpartition("/")
    if slash and not is_dns_subdomain(prefix):
        return False
    return len(name) <= MAX_LABEL and _NAME_PART.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    """Return whether a text is the value of a label, which may be empty."""
    return value == "" or (len(value) <= MAX_LABEL and _NAME_PART.fullmatch(value) is not None)


def check_new_metadata(meta: Json, is_name: Callable[[str], bool], name_rule: str, *, is_core: bool) -> Iterator[Cause]:
    """Check the metadata of a new object."""
    name = meta.get("name", "")
    if not name:
        yield required("metadata.name", "Required value: name or generateName is required")
    elif not is_name(name):
        yield invalid_value("metadata.name", name, name_rule)
    yield from _check_metadata(meta, is_core)


def check_changed_metadata(new: Json, old: Json, *, is_core: bool) -> Iterator[Cause]:
    """Check the metadata of an update. The server compares name and namespace with the request."""
    yield from _check_metadata(new, is_core)
    for key in ("uid", "deletionTimestamp", "deletionGracePeriodSeconds"):
        if new.get(key) != old.get(key):
            yield invalid_value(f"metadata.{key}", new.get(key), "field is immutable")
    if "deletionTimestamp" in old and (added := set(new.get("finalizers", ())) - set(old.get("finalizers", ()))):
        yield forbidden(
            "metadata.finalizers",
            f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}",
        )


def check_labels(values: Mapping[str, str], field: str) -> Iterator[Cause]:
    """Check a map of labels, of an object or of a selector."""
    for key, value in values.items():
        if not is_qualified_name(key):
            yield invalid_value(field, key, _QUALIFIED_NAME_RULE)
        if not is_label_value(value):
            yield invalid_value(field, value, "must be empty or at most 63 letters, digits, '-', '_' and '.'")


def _check_metadata(meta: Json, is_core: bool) -> Iterator[Cause]:
    yield from check_labels(meta.get("labels", {}), "metadata.labels")
    annotations: dict[str, str] = meta.get("annotations", {})
    for key in annotations:
        if not is_qualified_name(key.lower()):
            yield invalid_value("metadata.annotations", key, _QUALIFIED_NAME_RULE)
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > MAX_ANNOTATION_BYTES:
        yield Cause("metadata.annotations", "FieldValueTooLong", f"Too long: at most {MAX_ANNOTATION_BYTES} bytes")
    yield from _check_owners(meta.get("ownerReferences", ()))
    for index, finalizer in enumerate(meta.get("finalizers", ())):
        if not is_qualified_name(finalizer):
            yield invalid_value("metadata.finalizers", finalizer, _QUALIFIED_NAME_RULE)
        if is_core and "/" not in finalizer and finalizer not in _CORE_FINALIZERS:
            yield invalid_value(
                f"metadata.finalizers[{index}]", finalizer, "must be a standard finalizer or have a prefix"
            )


def _check_owners(references: list[dict[str, Any]]) -> Iterator[Cause]:
    path = "metadata.ownerReferences"
    for reference in references:
        group_version = reference.get("apiVersion", "")
        if not group_version.rpartition("/")[2]:
            yield invalid_value(f"{path}.apiVersion", group_version, "version must not be empty")
        for key in ("kind", "name", "uid"):
            if not reference.get(key):
                yield invalid_value(f"{path}.{key}", "", "must not be empty")
        if (group_version, reference.get("kind")) == ("v1", "Event"):
            yield invalid_value(path, group_version, "v1, Kind=Event is disallowed from being an owner")
    controllers = [f"{r.get('kind', '')}/{r.get('name', '')}" for r in references if r.get("controller")]
    if len(controllers) > 1:
        yield invalid_value(
            path, references, f"Only one reference can have Controller set to true. Found {controllers}"
        )


def check_pod_spec(spec: Json) -> Iterator[Cause]:
    """Check the spec of a new pod, with its defaults."""
    for key, supported in _POD_ENUMS.items():
        if spec[key] not in supported:
            yield unsupported(f"spec.{key}", spec[key], supported)
    yield from check_labels(spec.get("nodeSelector", {}), "spec.nodeSelector")
    yield from _check_names(spec)
    yield from _check_tolerations(spec.get("tolerations", ()))
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= _MAX_INT32:
        yield invalid_value("spec.activeDeadlineSeconds", deadline, f"must be between 1 and {_MAX_INT32}, inclusive")
    volumes = [volume.get("name", "") for volume in spec.get("volumes", ())]
    yield from _check_volumes(volumes)
    if not spec.get("containers"):
        yield required("spec.containers")
    seen: set[str] = set()
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            yield from _check_container(container, f"spec.{kind}[{index}]", seen, volumes)


def check_pod_update(new: Json, old: Json) -> Iterator[Cause]:
    """Check a change of a live pod's spec: only images, added tolerations and activeDeadlineSeconds may change."""
    yield from check_pod_spec(new)
    for kind in ("containers", "initContainers"):
        if len(new.get(kind, ())) != len(old.get(kind, ())):
            yield forbidden(f"spec.{kind}", "pod updates may not add or remove containers")
            return
    if _frozen(new) != _frozen(old) or not _only_appended(new, old):
        yield forbidden("spec", "pod updates may not change fields other than images, tolerations (additions)")


def check_pod_status(new: Json, old: Json) -> Iterator[Cause]:
    """Check a pod's status: a container that has ended and is not restarted must not run again."""
    status, before = new["status"], old["status"]
    if status.get("qosClass") != before.get("qosClass"):
        yield invalid_value("status.qosClass", status.get("qosClass"), "field is immutable")
    for key in ("podIPs", "hostIPs"):
        for index, item in enumerate(status.get(key, ())):
            if not _is_address(item.get("ip", "")):
                yield invalid_value(f"status.{key}[{index}]", item.get("ip"), "must be a valid IP address")
    if old["spec"]["restartPolicy"] == "Always":
        return
    ended = {
        container["name"]: container["state"]["terminated"]
        for container in before.get("containerStatuses", ())
        if "terminated" in container["state"]
    }
    for index, container in enumerate(status.get("containerStatuses", ())):
        terminated = ended.get(container["name"])
        retried = old["spec"]["restartPolicy"] == "OnFailure" and terminated and terminated["exitCode"] != 0
        if terminated and not retried and "terminated" not in container["state"]:
            yield forbidden(
                f"status.containerStatuses[{index}].state", "may not be transitioned to non-terminated state"
            )


def _check_names(spec: Json) -> Iterator[Cause]:
    for key in ("hostname", "subdomain"):
        if (value := spec.get(key)) is not None and not is_dns_label(value):
            yield invalid_value(f"spec.{key}", value, _LABEL_RULE)
    for key in ("nodeName", "serviceAccountName"):
        if (value := spec.get(key)) is not None and not is_dns_subdomain(value):
            yield invalid_value(f"spec.{key}", value, "a lowercase RFC 1123 subdomain")


def _check_tolerations(tolerations: list[Json]) -> Iterator[Cause]:
    for index, toleration in enumerate(tolerations):
        path = f"spec.tolerations[{index}]"
        if (operator := toleration.get("operator", "Equal")) not in ("Equal", "Exists"):
            yield unsupported(f"{path}.operator", operator, ("Equal", "Exists"))
        elif (operator == "Equal" and "key" not in toleration) or (operator == "Exists" and "value" in toleration):
            yield invalid_value(f"{path}.operator", operator, "Equal requires a key, Exists forbids a value")


def _check_volumes(volumes: list[str]) -> Iterator[Cause]:
    for index, name in enumerate(volumes):
        path = f"spec.volumes[{index}].name"
        if not name:
            yield required(path)
        elif not is_dns_label(name):
            yield invalid_value(path, name, _LABEL_RULE)
        elif name in volumes[:index]:
            yield duplicate(path, name)


def _check_container(container: Json, path: str, seen: set[str], volumes: list[str]) -> Iterator[Cause]:
    name, image = container.get("name", ""), container.get("image", "")
    if not name:
        yield required(f"{path}.name")
    elif not is_dns_label(name):
        yield invalid_value(f"{path}.name", name, _LABEL_RULE)
    elif name in seen:
        yield duplicate(f"{path}.name", name)
    seen.add(name)
    if not image:
        yield required(f"{path}.image")
    elif image != image.strip():
        yield invalid_value(f"{path}.image", image, "must not have leading or trailing whitespace")
    for key, supported in _CONTAINER_ENUMS.items():
        if container[key] not in supported:
            yield unsupported(f"{path}.{key}", container[key], supported)
    yield from _check_ports(container.get("ports", ()), path)
    yield from _check_env(container.get("env", ()), path)
    yield from _check_mounts(container.get("volumeMounts", ()), path, volumes)
    yield from _check_resources(container["resources"], path)


def _check_ports(ports: list[Json], path: str) -> Iterator[Cause]:
    names: set[str] = set()
    for index, port in enumerate(ports):
        here = f"{path}.ports[{index}]"
        number, name = port.get("containerPort", 0), port.get("name", "")
        if not number:
            yield required(f"{here}.containerPort")
        elif not 1 <= number <= 65535:
            yield invalid_value(f"{here}.containerPort", number, "must be between 1 and 65535, inclusive")
        if name and not _PORT_NAME.fullmatch(name):
            yield invalid_value(f"{here}.name", name, "must contain only lower case letters, digits and hyphens")
        elif name in names:
            yield duplicate(f"{here}.name", name)
        names |= {name} - {""}
        if port["protocol"] not in _PROTOCOLS:
            yield unsupported(f"{here}.protocol", port["protocol"], _PROTOCOLS)


def _check_env(env: list[Json], path: str) -> Iterator[Cause]:
    for index, variable in enumerate(env):
        here, name = f"{path}.env[{index}]", variable.get("name", "")
        if not name:
            yield required(f"{here}.name")
        elif not _ENV_NAME.fullmatch(name):
            yield invalid_value(f"{here}.name", name, "printable ASCII characters other than '='")
        if variable.get("value") and "valueFrom" in variable:
            yield invalid_value(f"{here}.valueFrom", "", "may not be specified when `value` is not empty")
        elif "valueFrom" in variable and len(variable["valueFrom"]) != 1:
            yield invalid_value(f"{here}.valueFrom", "", "exactly one source must be specified")


def _check_mounts(mounts: list[Json], path: str, volumes: list[str]) -> Iterator[Cause]:
    places: set[str] = set()
    for index, mount in enumerate(mounts):
        here, place = f"{path}.volumeMounts[{index}]", mount.get("mountPath", "")
        if not mount.get("name"):
            yield required(f"{here}.name")
        elif mount["name"] not in volumes:
            yield Cause(f"{here}.name", "FieldValueNotFound", f'Not found: "{mount["name"]}"')
        if not place:
            yield required(f"{here}.mountPath")
        elif place in places:
            yield invalid_value(f"{here}.mountPath", place, "must be unique")
        places.add(place)
        if ".." in mount.get("subPath", "").split("/"):
            yield invalid_value(f"{path}.volumeMounts.subPath", mount["subPath"], "must not contain '..'")


_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def _is_resource_name(name: str) -> bool:
    """Return whether a container may request this resource: a standard one, or one with a domain before its name."""
    return is_qualified_name(name) and ("/" in name or name in _STANDARD_RESOURCES or name.startswith("hugepages-"))


def _check_resources(resources: Json, path: str) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for part, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if not _is_resource_name(name):
                yield invalid_value(f"{path}.resources.{part}[{name}]", name, "must be the name of a resource")
            if amount(value) < 0:
                yield invalid_value(f"{path}.resources.{part}[{name}]", value, "must be greater than or equal to 0")
    for name, value in requests.items():
        if name in limits and amount(value) > amount(limits[name]):
            yield invalid_value(f"{path}.resources.requests", value, f"must be less than or equal to {name} limit")


def _frozen(spec: Json) -> Json:
    """Return a pod's spec without the fields that may change."""
    out = {key: value for key, value in spec.items() if key not in ("tolerations", "activeDeadlineSeconds")}
    for kind in ("containers", "initContainers"):
        out[kind] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(kind, ())]
    return out


def _only_appended(new: Json, old: Json) -> bool:
    tolerations: list[Any] = old.get("tolerations", [])
    return all(toleration in new.get("tolerations", []) for toleration in tolerations)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_service(spec: Json) -> Iterator[Cause]:
    """Check the spec of a Service, with its defaults. Only headless Services exist here."""
    if spec["type"] not in _SERVICE_TYPES:
        yield unsupported("spec.type", spec["type"], _SERVICE_TYPES)
    if spec["sessionAffinity"] not in _AFFINITIES:
        yield unsupported("spec.sessionAffinity", spec["sessionAffinity"], _AFFINITIES)
    if spec.get("clusterIP") != "None":
        if not spec.get("ports"):
            yield required("spec.ports")
        yield invalid_value(
            "spec.clusterIP", spec.get("clusterIP", ""), "only headless Services (None) exist in memory"
        )
    yield from check_labels(spec.get("selector", {}), "spec.selector")
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
                yield invalid_value(f"{path}.{key}", value, "must be between 1 and 65535, inclusive")
        if port["protocol"] not in _PROTOCOLS:
            yield unsupported(f"{path}.protocol", port["protocol"], _PROTOCOLS)
        if (number, port["protocol"]) in numbers:
            yield duplicate(path, number)
        names_seen.add(name)
        numbers.add((number, port["protocol"]))


def check_network_policy(spec: Json) -> Iterator[Cause]:
    """Check the spec of a NetworkPolicy, with its defaults. IP blocks and named ports are not checked."""
    yield from _check_selector(spec["podSelector"], "spec.podSelector")
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(spec.get(direction, ())):
            path = f"spec.{direction}[{index}]"
            for number, port in enumerate(rule.get("ports", ())):
                yield from _check_policy_port(port, f"{path}.ports[{number}]")
            for number, peer in enumerate(rule.get(peers, ())):
                yield from _check_peer(peer, f"{path}.{peers}[{number}]")
    types: list[str] = spec["policyTypes"]
    if len(types) > len(_POLICY_TYPES):
        yield invalid_value("spec.policyTypes", types, "may not specify more than two policyTypes")
        return
    for index, name in enumerate(types):
        if name not in _POLICY_TYPES:
            yield unsupported(f"spec.policyTypes[{index}]", name, _POLICY_TYPES)


def _check_policy_port(port: Json, path: str) -> Iterator[Cause]:
    number = port.get("port")
    if port["protocol"] not in _PROTOCOLS:
        yield unsupported(f"{path}.protocol", port["protocol"], _PROTOCOLS)
    if isinstance(number, int) and not 1 <= number <= 65535:
        yield invalid_value(f"{path}.port", number, "must be between 1 and 65535, inclusive")


def _check_peer(peer: Json, path: str) -> Iterator[Cause]:
    selectors = [key for key in ("podSelector", "namespaceSelector", "ipBlock") if key in peer]
    if not selectors:
        yield required(path)
    elif "ipBlock" in peer and len(selectors) > 1:
        yield forbidden(path, "may not specify both ipBlock and another peer")
    for key in ("podSelector", "namespaceSelector"):
        yield from _check_selector(peer.get(key, {}), f"{path}.{key}")


def _check_selector(selector: Json, path: str) -> Iterator[Cause]:
    yield from check_labels(selector.get("matchLabels", {}), f"{path}.matchLabels")
    for index, expression in enumerate(selector.get("matchExpressions", ())):
        where, operator = f"{path}.matchExpressions[{index}]", expression.get("operator", "")
        values = expression.get("values", ())
        if operator not in _SELECTOR_OPERATORS:
            yield invalid_value(f"{where}.operator", operator, "not a valid selector operator")
        elif operator in ("In", "NotIn") and not values:
            yield required(f"{where}.values")
        elif operator in ("Exists", "DoesNotExist") and values:
            yield forbidden(f"{where}.values", "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")


def check_claim(spec: Json) -> Iterator[Cause]:
    """Check the spec of a new PersistentVolumeClaim, with its defaults."""
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
        yield invalid_value("spec.resources[storage]", storage, "must be greater than zero")
    yield from check_labels(spec.get("selector", {}).get("matchLabels", {}), "spec.selector.matchLabels")
