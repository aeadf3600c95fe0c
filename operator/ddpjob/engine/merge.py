"""Merge parts of a pod: maps by key, known lists by their key field; all else is replaced.

The order of the calls in ``desired`` sets the precedence: defaults < user's template < fields of the spec.
Merge keys follow the ``patchMergeKey`` tags of Kubernetes' own types (``kubectl explain pod.spec.containers``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpjob.api.objects import Json

# Lists that are merged by element, and the field that identifies an element.
MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
    "imagePullSecrets": "name",
}
# Lists to which the elements of the overlay are added.
APPENDED = frozenset({"tolerations", "envFrom"})
# The same lists as ``template_faults`` checks them: the field, and whether it is optional.
_POD_LISTS = {"volumes": ("name", False), "imagePullSecrets": ("name", True)}
_CONTAINER_LISTS = {"volumeMounts": ("mountPath", False), "ports": ("name", True), "envFrom": ("name", True)}


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> Json:
    """Return ``base`` overridden by ``overlay``, without changing either; null in ``overlay`` overrides nothing."""
    merged: Json = dict(base)
    for key, value in overlay.items():
        if value is None:
            continue
        before = merged.get(key)
        # dict and list, not their abstract types, whose check takes several times as long.
        if isinstance(value, dict) and isinstance(before, dict):
            is_other_source = key == "valueFrom" and set(before) != set(value)
            merged[key] = dict(value) if is_other_source else merge(before, value)
        elif isinstance(value, list):
            merged[key] = _merge_list(key, before or [], value)
        else:
            merged[key] = value
    return merged


def _merge_list(key: str, base: Sequence[Any], overlay: Sequence[Any]) -> list[Any]:
    if key in APPENDED:
        return [*base, *(item for item in overlay if item not in base)]
    if key not in MERGE_KEYS:
        return list(overlay)
    field = MERGE_KEYS[key]
    # An env entry or a volume has one source; the API server refuses {value} merged with {valueFrom}.
    combine: Callable[[Json, Json], Json] = (lambda _, item: item) if key in ("env", "volumes") else merge
    named = {item[field]: item for item in base if _has_key(item, field)}
    unnamed = [item for item in (*base, *overlay) if not _has_key(item, field)]
    for item in overlay:
        if _has_key(item, field):
            named[item[field]] = combine(named[item[field]], item) if item[field] in named else item
    return [*named.values(), *unnamed]


def _has_key(item: Any, field: str) -> bool:
    # Fields that the CRD does not declare hold anything; the API server refuses what is no element of that list.
    return isinstance(item, dict) and isinstance(item.get(field), str)


def template_faults(template: Mapping[str, Any]) -> list[str]:
    """Return the reasons why ``merge`` cannot merge a user's template: one line each, with the path of the field.

    The CRD does not declare these fields, because a cluster may have fields that this version does not know.
    """
    return list(_of_pod(template.get("spec") or {}, "spec.template.spec"))


def _of_pod(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _of_object(spec, "securityContext", path)
    for field, (name, optional) in _POD_LISTS.items():
        yield from _of_list(spec.get(field), f"{path}.{field}", name, optional=optional)
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind) or ()):
            place = f"{path}.{kind}[{index}]"
            yield from _of_object(container, "securityContext", place)
            for field, (name, optional) in _CONTAINER_LISTS.items():
                yield from _of_list(container.get(field), f"{place}.{field}", name, optional=optional)


def _of_object(parent: Mapping[str, Any], field: str, path: str) -> Iterator[str]:
    if not isinstance(parent.get(field) or {}, Mapping):
        yield f"{path}.{field}: must be an object"


def _of_list(value: Any, path: str, name: str, *, optional: bool) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, list):
        yield f"{path}: must be a list"
        return
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            yield f"{path}[{index}]: must be an object"
        elif not (isinstance(item.get(name), str) or (optional and name not in item)):
            yield f"{path}[{index}].{name}: must be a string"
