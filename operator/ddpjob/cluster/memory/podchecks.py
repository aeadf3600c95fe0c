"""What the API server refuses about a pod: the checks that a rendered or hand-written DDPJob template can fail.

Fields that are not named here are checked for their types alone.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from ddpjob.cluster.base import Json
from ddpjob.cluster.memory.answers import Cause, duplicate, forbidden, required, unsupported, wrong
from ddpjob.cluster.memory.formats import is_dns_label, is_dns_subdomain
from ddpjob.cluster.memory.metadata import labels
from ddpjob.cluster.memory.quantities import amount

_ENV_NAME = re.compile(r"[ -<>-~]+")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_LABEL_RULE = "a lowercase RFC 1123 label must consist of lower case letters, digits and '-'"
_ENUMS = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"),
}
_CONTAINER_ENUMS = {
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
}
_PROTOCOLS = ("SCTP", "TCP", "UDP")
_MAX_INT32 = 2**31 - 1


def of_spec(spec: Json) -> Iterator[Cause]:
    """What is wrong with a new pod's spec, after defaults."""
    for key, words in _ENUMS.items():
        if spec[key] not in words:
            yield unsupported(f"spec.{key}", spec[key], words)
    yield from labels(spec.get("nodeSelector", {}), "spec.nodeSelector")
    yield from _names(spec)
    yield from _tolerations(spec.get("tolerations", ()))
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= _MAX_INT32:
        yield wrong("spec.activeDeadlineSeconds", deadline, f"must be between 1 and {_MAX_INT32}, inclusive")
    volumes = [volume.get("name", "") for volume in spec.get("volumes", ())]
    yield from _volumes(volumes)
    if not spec.get("containers"):
        yield required("spec.containers")
    seen: set[str] = set()
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            yield from _container(container, f"spec.{kind}[{index}]", seen, volumes)


def of_update(new: Json, old: Json) -> Iterator[Cause]:
    """A live pod's spec is fixed but for images and what only adds tolerations or shortens its time."""
    yield from of_spec(new)
    for kind in ("containers", "initContainers"):
        if len(new.get(kind, ())) != len(old.get(kind, ())):
            yield forbidden(f"spec.{kind}", "pod updates may not add or remove containers")
            return
    if _frozen(new) != _frozen(old) or not _only_appended(new, old):
        yield forbidden("spec", "pod updates may not change fields other than images, tolerations (additions)")


def of_status(new: Json, old: Json) -> Iterator[Cause]:
    """A pod whose containers are not restarted cannot run again."""
    status, before = new["status"], old["status"]
    if status.get("qosClass") != before.get("qosClass"):
        yield wrong("status.qosClass", status.get("qosClass"), "field is immutable")
    for key in ("podIPs", "hostIPs"):
        for index, item in enumerate(status.get(key, ())):
            if not _is_address(item.get("ip", "")):
                yield wrong(f"status.{key}[{index}]", item.get("ip"), "must be a valid IP address")
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


def _names(spec: Json) -> Iterator[Cause]:
    for key in ("hostname", "subdomain"):
        if (value := spec.get(key)) is not None and not is_dns_label(value):
            yield wrong(f"spec.{key}", value, _LABEL_RULE)
    for key in ("nodeName", "serviceAccountName"):
        if (value := spec.get(key)) is not None and not is_dns_subdomain(value):
            yield wrong(f"spec.{key}", value, "a lowercase RFC 1123 subdomain")


def _tolerations(tolerations: list[Json]) -> Iterator[Cause]:
    for index, toleration in enumerate(tolerations):
        path = f"spec.tolerations[{index}]"
        if (operator := toleration.get("operator", "Equal")) not in ("Equal", "Exists"):
            yield unsupported(f"{path}.operator", operator, ("Equal", "Exists"))
        elif (operator == "Equal" and "key" not in toleration) or (operator == "Exists" and "value" in toleration):
            yield wrong(f"{path}.operator", operator, "key and value do not fit the operator")


def _volumes(volumes: list[str]) -> Iterator[Cause]:
    for index, name in enumerate(volumes):
        path = f"spec.volumes[{index}].name"
        if not name:
            yield required(path)
        elif not is_dns_label(name):
            yield wrong(path, name, _LABEL_RULE)
        elif name in volumes[:index]:
            yield duplicate(path, name)


def _container(container: Json, path: str, seen: set[str], volumes: list[str]) -> Iterator[Cause]:
    name, image = container.get("name", ""), container.get("image", "")
    if not name:
        yield required(f"{path}.name")
    elif not is_dns_label(name):
        yield wrong(f"{path}.name", name, _LABEL_RULE)
    elif name in seen:
        yield duplicate(f"{path}.name", name)
    seen.add(name)
    if not image:
        yield required(f"{path}.image")
    elif image != image.strip():
        yield wrong(f"{path}.image", image, "must not have leading or trailing whitespace")
    for key, words in _CONTAINER_ENUMS.items():
        if container[key] not in words:
            yield unsupported(f"{path}.{key}", container[key], words)
    yield from _ports(container.get("ports", ()), path)
    yield from _env(container.get("env", ()), path)
    yield from _mounts(container.get("volumeMounts", ()), path, volumes)
    yield from _resources(container["resources"], path)


def _ports(ports: list[Json], path: str) -> Iterator[Cause]:
    names: set[str] = set()
    for index, port in enumerate(ports):
        here = f"{path}.ports[{index}]"
        number, name = port.get("containerPort", 0), port.get("name", "")
        if not number:
            yield required(f"{here}.containerPort")
        elif not 1 <= number <= 65535:
            yield wrong(f"{here}.containerPort", number, "must be between 1 and 65535, inclusive")
        if name and not _PORT_NAME.fullmatch(name):
            yield wrong(f"{here}.name", name, "must contain only lower case letters, digits and hyphens")
        elif name in names:
            yield duplicate(f"{here}.name", name)
        names |= {name} - {""}
        if port["protocol"] not in _PROTOCOLS:
            yield unsupported(f"{here}.protocol", port["protocol"], _PROTOCOLS)


def _env(env: list[Json], path: str) -> Iterator[Cause]:
    for index, variable in enumerate(env):
        here, name = f"{path}.env[{index}]", variable.get("name", "")
        if not name:
            yield required(f"{here}.name")
        elif not _ENV_NAME.fullmatch(name):
            yield wrong(f"{here}.name", name, "printable ASCII characters other than '='")
        if variable.get("value") and "valueFrom" in variable:
            yield wrong(f"{here}.valueFrom", "", "may not be specified when `value` is not empty")
        elif "valueFrom" in variable and len(variable["valueFrom"]) != 1:
            yield wrong(f"{here}.valueFrom", "", "exactly one source must be specified")


def _mounts(mounts: list[Json], path: str, volumes: list[str]) -> Iterator[Cause]:
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
            yield wrong(f"{here}.mountPath", place, "must be unique")
        places.add(place)
        if ".." in mount.get("subPath", "").split("/"):
            yield wrong(f"{path}.volumeMounts.subPath", mount["subPath"], "must not contain '..'")


def _resources(resources: Json, path: str) -> Iterator[Cause]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for part, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if amount(value) < 0:
                yield wrong(f"{path}.resources.{part}[{name}]", value, "must be greater than or equal to 0")
    for name, value in requests.items():
        if name in limits and amount(value) > amount(limits[name]):
            yield wrong(f"{path}.resources.requests", value, f"must be less than or equal to {name} limit")


def _frozen(spec: Json) -> Json:
    """The spec without what may change."""
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
