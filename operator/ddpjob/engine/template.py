"""The shape of those parts of ``spec.template`` that rendering merges and that the CRD does not declare.

The CRD lets them through as they are, because a cluster may know fields that this version does not. What is merged
element by element must still be a list of objects with names, or be refused by the name of the field.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# List -> the field that names its elements, and whether an element may do without.
_POD_LISTS = {"volumes": ("name", False), "imagePullSecrets": ("name", True)}
_CONTAINER_LISTS = {"volumeMounts": ("mountPath", False), "ports": ("name", True), "envFrom": ("name", True)}


def template_faults(template: Mapping[str, Any]) -> list[str]:
    """What keeps a template (as in the manifest) from being merged, one line each with the field's path."""
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
