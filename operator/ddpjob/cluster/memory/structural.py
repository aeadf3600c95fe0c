"""The checks of a custom resource: its schema's first, then the CEL rules, in the words and order of the API server."""

import re
from collections.abc import Mapping
from typing import Any

from ddpjob.cluster.memory.answers import Cause, duplicate, required, unsupported, wrong
from ddpjob.cluster.memory.celvalues import CelError, end_of_text
from ddpjob.cluster.memory.formats import is_time
from ddpjob.cluster.memory.schema import Node, Schema

_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
# Types as type() gives them: bool is no int here.
_FITTING: Mapping[str, frozenset[type]] = {
    **{name: frozenset({python}) for python, name in _TYPE_NAMES.items()},
    "number": frozenset({int, float}),
    "integer or string": frozenset({int, str}),
}
_BLOCKING = frozenset(
    {
        *("FieldValueRequired", "FieldValueNotSupported", "FieldValueTypeInvalid"),
        *("FieldValueTooLong", "FieldValueTooMany"),
    }
)
_NOT_CHECKED = Cause(
    "<nil>",
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
)


def violations(schema: Schema, value: Any, path: str, found: list[Cause]) -> None:
    """Add what is wrong with ``value``, rules in CEL apart, to ``found``."""
    kind = type(value)
    if schema.type and kind not in _FITTING[schema.type]:
        name = "null" if value is None else _TYPE_NAMES[kind]
        message = f'Invalid value: "{name}": must be of type {schema.type}: "{name}"'
        found.append(Cause(path, "FieldValueTypeInvalid", message))
        if kind not in (int, float):
            return
    if schema.has_scalar_checks:
        found += _scalar_causes(schema.node, value, path)
    if kind is dict:
        _object(schema, value, path, found)
    elif kind is list:
        _list(schema, value, path, found)


def _scalar_causes(node: Node, value: Any, path: str) -> list[Cause]:
    found = [unsupported(path, value, node["enum"])] if "enum" in node and value not in node["enum"] else []
    if isinstance(value, str):
        found += _of_string(node, value, path)
    elif type(value) in (int, float):
        if value < node.get("minimum", value):
            found.append(wrong(path, value, f"should be greater than or equal to {node['minimum']}"))
        if value > node.get("maximum", value):
            found.append(wrong(path, value, f"should be less than or equal to {node['maximum']}"))
    return found


def _of_string(node: Node, value: str, path: str) -> list[Cause]:
    found: list[Cause] = []
    if len(value) > node.get("maxLength", len(value)):
        found.append(Cause(path, "FieldValueTooLong", f"Too long: may not be more than {node['maxLength']} bytes"))
    if len(value) < node.get("minLength", 0):
        found.append(wrong(path, value, f"should be at least {node['minLength']} chars long"))
    if "pattern" in node and not re.search(end_of_text(node["pattern"]), value):
        found.append(wrong(path, value, f"should match '{node['pattern']}'"))
    if node.get("format") == "date-time" and not is_time(value):
        message = f'Invalid value: "{value}": must be of type date-time: "{value}"'
        found.append(Cause(path, "FieldValueTypeInvalid", message))
    return found


def _object(schema: Schema, value: Mapping[str, Any], path: str, found: list[Cause]) -> None:
    node = schema.node
    if len(value) > node.get("maxProperties", len(value)):
        message = f"Too many: must have at most {node['maxProperties']} items"
        found.append(Cause(path, "FieldValueTooMany", message))
    for key in node.get("required", ()):
        if key not in value:
            found.append(required(f"{path}.{key}" if path else key))
    for key, item in value.items():
        if (child := schema.child(key)) is not None:
            violations(child, item, f"{path}.{key}" if path else key, found)


def _list(schema: Schema, value: list[Any], path: str, found: list[Cause]) -> None:
    node = schema.node
    if len(value) > node.get("maxItems", len(value)):
        found.append(Cause(path, "FieldValueTooMany", f"Too many: must have at most {node['maxItems']} items"))
    if len(value) < node.get("minItems", 0):
        found.append(wrong(path, value, f"should have at least {node['minItems']} items"))
    if schema.items is not None:
        for index, item in enumerate(value):
            violations(schema.items, item, f"{path}[{index}]", found)
    seen: list[tuple[Any, ...]] = []
    for index, item in enumerate(value if schema.keys else ()):
        if isinstance(item, dict):
            key = tuple(item.get(name) for name in schema.keys)
            if key in seen:
                found.append(duplicate(f"{path}[{index}]", "/".join(map(str, key))))
            seen.append(key)


def broken_rules(schema: Schema, value: Any, old: Any, path: str, found: list[Cause]) -> None:
    """Add CEL rules that do not hold. ``old``: the value before an update where the two correlate, else None."""
    if not schema.has_rules:
        return
    for rule in schema.rules:
        if rule.compares and old is None:
            continue
        try:
            broken = rule.holds({"self": value, "oldSelf": old}) is not True
            message = f'Invalid value: "object": {rule.message}'
        except CelError as error:
            broken, message = True, f'Invalid value: "object": {error} evaluating rule: {rule.message}'
        if broken:
            found.append(Cause(path or "<nil>", "FieldValueInvalid", message))
    if isinstance(value, dict):
        for key, item in value.items():
            if (child := schema.child(key)) is not None:
                before = old.get(key) if isinstance(old, dict) else None
                broken_rules(child, item, before, f"{path}.{key}" if path else key, found)
    elif isinstance(value, list) and schema.items is not None:
        for index, item in enumerate(value):
            broken_rules(schema.items, item, _correlated(schema, item, old), f"{path}[{index}]", found)


def _correlated(schema: Schema, item: Any, old: Any) -> Any:
    """The element of the old list with the same keys; elements of other lists have no past."""
    if not schema.keys or not isinstance(old, list):
        return None
    return next((before for before in old if all(before.get(key) == item.get(key) for key in schema.keys)), None)


def causes(schema: Schema, value: Any, old: Any, path: str, before: list[Cause]) -> list[Cause]:
    """Everything wrong with an object; rules are only looked at when its shape is right. ``before``: of metadata."""
    found = list(before)
    violations(schema, value, path, found)
    if any(cause.reason in _BLOCKING for cause in found):
        return [*found, _NOT_CHECKED]
    broken_rules(schema, value, old, path, found)
    return found
