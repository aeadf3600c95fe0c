"""Checks of objects as the API server makes them: names, labels, owners, and what makes a pod, Service or claim usable.

Each check yields a ``Cause`` for everything that is wrong. Values of other fields are checked only for their types, in
``decoding``. Names, labels: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from ddpjob.api.objects import Json
from tests.worlds.memory.api_errors import Cause

MAX_LABEL = 63
MAX_SUBDOMAIN = 253
MAX_ANNOTATION_BYTES = 256 * 1024
IMMUTABLE = "field is immutable"

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_CORE_FINALIZERS = frozenset({"kubernetes", "orphan", "foregroundDeletion"})


def is_dns_label(value: str) -> bool:
    """Return whether a text is an RFC 1123 label: the name of a container or a volume."""
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


def check_new_metadata(meta: Json, is_name: Callable[[str], bool], *, is_core: bool) -> Iterator[Cause]:
    """Check the metadata of a new object. is_core: finalizers must be qualified, as in Kubernetes' own kinds."""
    name = meta.get("name", "")
    if not name or not is_name(name):
        yield Cause("metadata.name", f"{name!r} is no name of such an object")
    yield from _check_metadata(meta, is_core)


def check_changed_metadata(new: Json, old: Json, *, is_core: bool) -> Iterator[Cause]:
    """Check the metadata of an update. The server compares name and namespace with the request."""
    yield from _check_metadata(new, is_core)
    for key in ("uid", "deletionTimestamp", "deletionGracePeriodSeconds"):
        if new.get(key) != old.get(key):
            yield Cause(f"metadata.{key}", IMMUTABLE)
    if "deletionTimestamp" in old and (added := set(new.get("finalizers", ())) - set(old.get("finalizers", ()))):
        yield Cause("metadata.finalizers", f"no new finalizers if the object is being deleted: {sorted(added)}")


def _check_metadata(meta: Json, is_core: bool) -> Iterator[Cause]:
    yield from _check_labels(meta.get("labels", {}))
    annotations: dict[str, str] = meta.get("annotations", {})
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATION_BYTES or not all(is_qualified_name(key.lower()) for key in annotations):
        yield Cause("metadata.annotations", f"at most {MAX_ANNOTATION_BYTES} bytes, with qualified names as keys")
    yield from _check_owners(meta.get("ownerReferences", ()))
    for index, finalizer in enumerate(meta.get("finalizers", ())):
        if not is_qualified_name(finalizer):
            yield Cause("metadata.finalizers", f"{finalizer!r} is no qualified name")
        if is_core and "/" not in finalizer and finalizer not in _CORE_FINALIZERS:
            yield Cause(f"metadata.finalizers[{index}]", "must be a standard finalizer or have a prefix")


def _check_labels(values: Mapping[str, str]) -> Iterator[Cause]:
    for key, value in values.items():
        if not is_qualified_name(key) or not is_label_value(value):
            yield Cause("metadata.labels", f"{key}={value} is no label")


def _check_owners(references: list[Json]) -> Iterator[Cause]:
    path = "metadata.ownerReferences"
    for reference in references:
        for key in ("apiVersion", "kind", "name", "uid"):
            if not reference.get(key):
                yield Cause(f"{path}.{key}", "must not be empty")
    if sum(bool(reference.get("controller")) for reference in references) > 1:
        yield Cause(path, "only one reference can have controller set to true")


def check_pod_spec(spec: Json) -> Iterator[Cause]:
    """Check the spec of a new pod, with its defaults: its containers, its volumes and what mounts them."""
    volumes = [volume.get("name", "") for volume in spec.get("volumes", ())]
    for index, name in enumerate(volumes):
        if not is_dns_label(name) or name in volumes[:index]:
            yield Cause(f"spec.volumes[{index}].name", f"{name!r} must be a label, and unique")
    if not spec.get("containers"):
        yield Cause("spec.containers", "required")
    seen: set[str] = set()
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, ())):
            yield from _check_container(container, f"spec.{kind}[{index}]", seen, volumes)


def _check_container(container: Json, path: str, seen: set[str], volumes: list[str]) -> Iterator[Cause]:
    name = container.get("name", "")
    if not is_dns_label(name) or name in seen:
        yield Cause(f"{path}.name", f"{name!r} must be a label, and unique")
    seen.add(name)
    if not container.get("image"):
        yield Cause(f"{path}.image", "required")
    places: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts", ())):
        here, place = f"{path}.volumeMounts[{index}]", mount.get("mountPath", "")
        if mount.get("name") not in volumes:
            yield Cause(f"{here}.name", f"there is no volume {mount.get('name')}")
        if not place or place in places:
            yield Cause(f"{here}.mountPath", f"{place!r} must be unique")
        places.add(place)


def check_pod_update(new: Json, old: Json) -> Iterator[Cause]:
    """Check a change of a live pod's spec: only images, added tolerations and activeDeadlineSeconds may change."""
    yield from check_pod_spec(new)
    for kind in ("containers", "initContainers"):
        if len(new.get(kind, ())) != len(old.get(kind, ())):
            yield Cause(f"spec.{kind}", "pod updates may not add or remove containers")
            return
    is_appended = all(toleration in new.get("tolerations", ()) for toleration in old.get("tolerations", ()))
    if _frozen(new) != _frozen(old) or not is_appended:
        yield Cause("spec", "pod updates may not change fields other than images, tolerations (additions)")


def _frozen(spec: Json) -> Json:
    """Return a pod's spec without the fields that may change."""
    out = {key: value for key, value in spec.items() if key not in ("tolerations", "activeDeadlineSeconds")}
    for kind in ("containers", "initContainers"):
        out[kind] = [{k: v for k, v in c.items() if k != "image"} for c in spec.get(kind, ())]
    return out


def check_pod_status(new: Json, old: Json) -> Iterator[Cause]:
    """Check a pod's status: a container that has ended and is not restarted must not run again."""
    status, before, policy = new["status"], old["status"], old["spec"]["restartPolicy"]
    if status.get("qosClass") != before.get("qosClass"):
        yield Cause("status.qosClass", IMMUTABLE)
    if policy == "Always":
        return
    states = {container["name"]: container["state"] for container in before.get("containerStatuses", ())}
    for index, container in enumerate(status.get("containerStatuses", ())):
        terminated = states.get(container["name"], {}).get("terminated")
        retried = policy == "OnFailure" and terminated and terminated["exitCode"] != 0
        if terminated and not retried and "terminated" not in container["state"]:
            path = f"status.containerStatuses[{index}].state"
            yield Cause(path, "may not be transitioned to non-terminated state")


def check_service(spec: Json) -> Iterator[Cause]:
    """Check the spec of a Service, with its defaults. Only headless Services exist here."""
    if spec.get("clusterIP") != "None":
        yield Cause("spec.clusterIP", "only headless Services (None) exist in memory")


def check_claim(spec: Json) -> Iterator[Cause]:
    """Check the spec of a new PersistentVolumeClaim, with its defaults."""
    if not spec.get("accessModes"):
        yield Cause("spec.accessModes", "at least 1 access mode is required")
    if spec["resources"].get("requests", {}).get("storage") is None:
        yield Cause("spec.resources[storage]", "required")
