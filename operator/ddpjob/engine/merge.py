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
# Those of these lists that the CRD does not declare, and the lists whose elements need no key.
_OPEN_LISTS = ("volumes", "imagePullSecrets", "volumeMounts", "ports", "envFrom")
_OPTIONAL = frozenset({"imagePullSecrets", "ports", "envFrom"})


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
    spec, root = template.get("spec") or {}, "spec.template.spec"
    parts = [(root, spec)]
    for kind in ("containers", "initContainers"):
        parts += [(f"{root}.{kind}[{index}]", each) for index, each in enumerate(spec.get(kind) or ())]
    return [fault for path, part in parts for fault in _faults(part, path)]


def _faults(part: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the faults of a pod or container."""
    if not isinstance(part.get("securityContext") or {}, Mapping):
        yield f"{path}.securityContext: must be an object"
    for field in _OPEN_LISTS:
        key, given = MERGE_KEYS.get(field, "name"), part.get(field)
        if given is not None and not isinstance(given, list):
            yield f"{path}.{field}: must be a list"
            continue
        for index, item in enumerate(given or ()):
            if not isinstance(item, Mapping):
                yield f"{path}.{field}[{index}]: must be an object"
            elif not isinstance(item.get(key, "" if field in _OPTIONAL else None), str):
                yield f"{path}.{field}[{index}].{key}: must be a string"
