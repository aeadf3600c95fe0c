"""Checks of ``metadata``, the same for every kind: https://kubernetes.io/docs/reference/using-api/api-concepts/."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpjob.cluster.base import Json
from ddpjob.cluster.memory.answers import Cause, forbidden, required, wrong
from ddpjob.cluster.memory.formats import is_label_value, is_qualified_name

MAX_ANNOTATION_BYTES = 256 * 1024

_CORE_FINALIZERS = frozenset({"kubernetes", "orphan", "foregroundDeletion"})

# What only the API server sets; whatever a client says about it on create is ignored.
SYSTEM_FIELDS = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "generation",
)


def on_create(meta: Json, is_name: Callable[[str], bool], name_rule: str, *, is_core: bool) -> Iterator[Cause]:
    """What is wrong with a new object's metadata."""
    name = meta.get("name", "")
    if not name:
        yield required("metadata.name", "Required value: name or generateName is required")
    elif not is_name(name):
        yield wrong("metadata.name", name, name_rule)
    yield from _always(meta, is_core)


def on_update(new: Json, old: Json, *, is_core: bool) -> Iterator[Cause]:
    """What is wrong with the metadata of an update; name and namespace were compared with the request before."""
    yield from _always(new, is_core)
    for key in ("uid", "deletionTimestamp", "deletionGracePeriodSeconds"):
        if new.get(key) != old.get(key):
            yield wrong(f"metadata.{key}", new.get(key), "field is immutable")
    if "deletionTimestamp" in old and (added := set(new.get("finalizers", ())) - set(old.get("finalizers", ()))):
        yield forbidden(
            "metadata.finalizers",
            f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}",
        )


def keep_system_fields(new: Json, old: Json) -> None:
    """Put back what an update cannot change, however it was said, and what it left out."""
    for key in ("creationTimestamp", "generation"):
        new.pop(key, None)
        if key in old:
            new[key] = old[key]
    if "deletionTimestamp" in old:
        new["deletionTimestamp"] = old["deletionTimestamp"]
    for key in ("uid", "deletionGracePeriodSeconds"):
        if key in old:
            new.setdefault(key, old[key])


def tidied(meta: Json) -> Json:
    """Without the bookkeeping of field managers, and with equal references to owners once."""
    out = {key: value for key, value in meta.items() if key != "managedFields"}
    references = out.get("ownerReferences")
    if references is not None:
        out["ownerReferences"] = [ref for index, ref in enumerate(references) if ref not in references[:index]]
    return out


def labels(values: Mapping[str, str], field: str) -> Iterator[Cause]:
    """What is wrong with a map of labels, wherever it stands."""
    for key, value in values.items():
        if not is_qualified_name(key):
            yield wrong(field, key, "no qualified name ([prefix/]name)")
        if not is_label_value(value):
            yield wrong(field, value, "a valid label must be empty or at most 63 letters, digits, '-', '_' and '.'")


def _always(meta: Json, is_core: bool) -> Iterator[Cause]:
    yield from labels(meta.get("labels", {}), "metadata.labels")
    annotations: dict[str, str] = meta.get("annotations", {})
    for key in annotations:
        if not is_qualified_name(key.lower()):
            yield wrong("metadata.annotations", key, "no qualified name ([prefix/]name)")
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > MAX_ANNOTATION_BYTES:
        yield Cause("metadata.annotations", "FieldValueTooLong", f"Too long: at most {MAX_ANNOTATION_BYTES} bytes")
    yield from _owners(meta.get("ownerReferences", ()))
    for index, finalizer in enumerate(meta.get("finalizers", ())):
        if not is_qualified_name(finalizer):
            yield wrong("metadata.finalizers", finalizer, "no qualified name ([prefix/]name)")
        if is_core and "/" not in finalizer and finalizer not in _CORE_FINALIZERS:
            yield wrong(f"metadata.finalizers[{index}]", finalizer, "neither a standard finalizer nor fully qualified")


def _owners(references: list[dict[str, Any]]) -> Iterator[Cause]:
    path = "metadata.ownerReferences"
    for reference in references:
        group_version = reference.get("apiVersion", "")
        if not group_version.rpartition("/")[2]:
            yield wrong(f"{path}.apiVersion", group_version, "version must not be empty")
        for key in ("kind", "name", "uid"):
            if not reference.get(key):
                yield wrong(f"{path}.{key}", "", "must not be empty")
        if (group_version, reference.get("kind")) == ("v1", "Event"):
            yield wrong(path, group_version, "v1, Kind=Event is disallowed from being an owner")
    controllers = [f"{r.get('kind', '')}/{r.get('name', '')}" for r in references if r.get("controller")]
    if len(controllers) > 1:
        yield wrong(path, references, f"Only one reference can have Controller set to true. Found {controllers}")
