"""Reads Kubernetes' own kinds as the API server does: unknown fields, wrong types, and what an empty value means.

The field names and types are those of the official client's models, so nothing is listed twice. Importing them
costs some tenths of a second and is put off until the first object of such a kind is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ddpjob.cluster.memory.formats import canonical_time, is_time
from ddpjob.cluster.memory.quantities import canonical, is_quantity

# The models do not tell a Go pointer, whose empty value is kept, from a plain field, whose empty value is left out.
_KEPT_EMPTY = frozenset({"storageClassName", "volumeMode", "runtimeClassName", "ipFamilyPolicy"})
_DROPPED_FALSE = frozenset(
    {"hostNetwork", "hostPID", "hostIPC", "stdin", "stdinOnce", "tty", "readOnly", "publishNotReadyAddresses"}
)
_DROPPED_ZERO = frozenset(
    {"hostPort", "nodePort", "signal", "count", "generation", "observedGeneration", "healthCheckNodePort"}
)
_QUANTITIES = frozenset({"sizeLimit", "divisor"})
_QUANTITY_MAPS = frozenset(["limits", "requests", "overhead", "capacity", "allocatedResources"])
_MICRO_TIMES = frozenset({"eventTime", "lastObservedTime"})

_GO_TYPES = {"str": "string", "int": "int64", "bool": "bool", "float": "float64", "datetime": "Time"}
_JSON_NAMES = {str: "string", bool: "bool", int: "number", float: "number", dict: "object", list: "array"}


@dataclass
class Findings:
    """What was wrong on the way: fields nobody knows, in order, and the first value of a wrong type."""

    unknown: list[str] = field(default_factory=list)
    mistyped: str = ""


class _MistypedError(Exception):
    """A value that the field's type cannot hold."""


def read(model: str, value: Any, path: str, findings: Findings) -> Any:
    """``value`` as the API server would hand it back; what it cannot make sense of goes into ``findings``."""
    try:
        return _typed(model, value, path, findings)
    except _MistypedError as error:
        findings.mistyped = findings.mistyped or str(error)
        return value


@cache
def _fields(model: str) -> Mapping[str, str]:
    """JSON name and type of every field of a model."""
    from kubernetes.aio.client import models  # noqa: PLC0415 - see above

    cls = getattr(models, model)
    return {cls.attribute_map[name]: kind for name, kind in cls.openapi_types.items()}


@cache
def _element(kind: str) -> tuple[str, str] | None:
    """("list" or "map", type of the elements), or None for any other type."""
    if found := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        return "list", found[1]
    if found := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", kind):
        return "map", found[1]
    return None


def _typed(kind: str, value: Any, path: str, findings: Findings) -> Any:
    if (element := _element(kind)) is not None:
        shape, inner = element
        return _list(inner, value, path, findings) if shape == "list" else _map(inner, value, path, findings)
    if kind == "object":
        _require(isinstance(value, str | int) and not isinstance(value, bool), value, path, "intstr.IntOrString")
        return value
    if kind in _GO_TYPES:
        return _scalar(kind, value, path)
    return _struct(kind, value, path, findings)


def _struct(model: str, value: Any, path: str, findings: Findings) -> Any:
    _require(isinstance(value, dict), value, path, model)
    fields = _fields(model)
    out = {}
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if key not in fields:
            findings.unknown.append(here)
        elif item is not None:
            read_item = _field(fields[key], key, item, here, findings)
            if not _is_left_out(fields[key], key, read_item):
                out[key] = read_item
    return out


def _field(kind: str, key: str, value: Any, path: str, findings: Findings) -> Any:
    if key in _QUANTITIES:
        return _quantity(value, path)
    if key in _QUANTITY_MAPS and isinstance(value, dict):
        # The API server has always rounded lists of resources to thousandths.
        return {name: _quantity(item, f"{path}.{name}", finest=-3) for name, item in value.items()}
    if kind == "datetime" and isinstance(value, str) and is_time(value):
        return canonical_time(value, micro=key in _MICRO_TIMES)
    return _typed(kind, value, path, findings)


def _is_left_out(kind: str, key: str, value: Any) -> bool:
    """Whether the empty value of this field is the same as none."""
    if value in ("", [], {}) and not isinstance(value, bool | int):
        return key not in _KEPT_EMPTY and (kind in _GO_TYPES or _element(kind) is not None)
    return (value is False and key in _DROPPED_FALSE) or (kind == "int" and value == 0 and key in _DROPPED_ZERO)


def _list(kind: str, value: Any, path: str, findings: Findings) -> Any:
    _require(isinstance(value, list), value, path, "list")
    empty: Any = "" if kind == "str" else {}
    return [
        _typed(kind, empty if item is None else item, f"{path}[{index}]", findings) for index, item in enumerate(value)
    ]


def _map(kind: str, value: Any, path: str, findings: Findings) -> Any:
    _require(isinstance(value, dict), value, path, "map")
    return {key: _typed(kind, "" if item is None else item, f"{path}.{key}", findings) for key, item in value.items()}


def _scalar(kind: str, value: Any, path: str) -> Any:
    python_type = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str}[kind]
    fits = isinstance(value, python_type) and (kind == "bool" or not isinstance(value, bool))  # type: ignore[arg-type]
    _require(fits, value, path, _GO_TYPES[kind])
    if kind == "datetime":
        _require(is_time(value), value, path, "Time")
    return value


def _quantity(value: Any, path: str, *, finest: int = -9) -> str:
    if value is None:
        return "0"
    if not is_quantity(value):
        raise _MistypedError(f"{path}: quantities must be a number with an optional suffix, such as 500m or 16Gi")
    return canonical(value, finest=finest)


def _require(fits: bool, value: Any, path: str, wanted: str) -> None:
    if not fits:
        name = "null" if value is None else _JSON_NAMES[type(value)]
        raise _MistypedError(f"json: cannot unmarshal {name} into Go struct field {path} of type {wanted}")
