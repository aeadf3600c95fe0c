"""What the API server does with a custom resource and its structural schema: unknown fields, nulls, defaults, checks.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/ describes each step.
Only keywords that the project's CRD uses are understood; ``Schema.of`` refuses others rather than ignore them.
"""

import re
from collections.abc import Iterator
from typing import Any

from ddpjob.cluster.memory.answers import Cause, duplicate, required, unsupported, wrong
from ddpjob.cluster.memory.cel import compile_rule, is_transition_rule
from ddpjob.cluster.memory.celvalues import CelError, end_of_text
from ddpjob.cluster.memory.formats import is_time

Node = dict[str, Any]

_KNOWN = frozenset(
    {
        *(
            "additionalProperties",
            "anyOf",
            "default",
            "description",
            "enum",
            "format",
            "items",
            "maxItems",
            "maxLength",
        ),
        *("maxProperties", "maximum", "minItems", "minLength", "minimum", "pattern", "properties", "required", "type"),
        *("x-kubernetes-int-or-string", "x-kubernetes-list-map-keys", "x-kubernetes-list-type"),
        *("x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    }
)
_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_BLOCKING = frozenset({"FieldValueRequired", "FieldValueNotSupported", "FieldValueTypeInvalid"}) | {
    "FieldValueTooLong",
    "FieldValueTooMany",
}
_NOT_CHECKED = Cause(
    "<nil>",
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
)


def check_keywords(node: Node) -> None:
    """Raises ``NotImplementedError`` for a keyword that this module would silently ignore."""
    if unknown := node.keys() - _KNOWN:
        raise NotImplementedError(f"schema keyword not implemented: {', '.join(sorted(unknown))}")
    for rule in node.get("x-kubernetes-validations", ()):
        compile_rule(rule["rule"])
    for child in _children(node):
        check_keywords(child)


def _children(node: Node) -> Iterator[Node]:
    yield from node.get("properties", {}).values()
    yield from (node[key] for key in ("items", "additionalProperties") if key in node)


def unknown_fields(node: Node, value: Any, path: str = "") -> Iterator[str]:
    """Paths of fields that the schema does not know, in the order of the document."""
    if isinstance(value, dict):
        keeps = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
        for key, item in value.items():
            here = f"{path}.{key}" if path else key
            if (child := _property(node, key)) is not None:
                yield from unknown_fields(child, item, here)
            elif not keeps:
                yield here
    elif isinstance(value, list) and "items" in node:
        for index, item in enumerate(value):
            yield from unknown_fields(node["items"], item, f"{path}[{index}]")


def _property(node: Node, key: str) -> Node | None:
    child: Node | None = node.get("properties", {}).get(key, node.get("additionalProperties"))
    return child


def defaulted(node: Node, value: Any) -> Any:
    """``value`` without the nulls of known fields and with every default; ``value`` itself is not changed."""
    if isinstance(value, dict):
        out = {
            key: item if (child := _property(node, key)) is None else defaulted(child, item)
            for key, item in value.items()
            if item is not None or _property(node, key) is None
        }
        for key, child in node.get("properties", {}).items():
            if key not in out and "default" in child:
                out[key] = defaulted(child, child["default"])
        return out
    if isinstance(value, list) and "items" in node:
        return [defaulted(node["items"], item) for item in value]
    return value


def violations(node: Node, value: Any, path: str) -> Iterator[Cause]:
    """What is wrong with ``value``, rules in CEL apart."""
    if not _has_type(node, value):
        kind = "null" if value is None else _TYPE_NAMES[type(value)]
        wanted = node.get("type", "integer or string")
        yield Cause(path, "FieldValueTypeInvalid", f'Invalid value: "{kind}": must be of type {wanted}: "{kind}"')
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
    if "enum" in node and value not in node["enum"]:
        yield unsupported(path, value, node["enum"])
    if isinstance(value, str):
        yield from _of_string(node, value, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _of_number(node, value, path)
    elif isinstance(value, dict):
        yield from _of_object(node, value, path)
    elif isinstance(value, list):
        yield from _of_list(node, value, path)


def _has_type(node: Node, value: Any) -> bool:
    if node.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    match node.get("type"):
        case None:
            return True
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case name:
            return value is not None and _TYPE_NAMES[type(value)] == name


def _of_string(node: Node, value: str, path: str) -> Iterator[Cause]:
    if len(value) > node.get("maxLength", len(value)):
        yield Cause(path, "FieldValueTooLong", f"Too long: may not be more than {node['maxLength']} bytes")
    if len(value) < node.get("minLength", 0):
        yield wrong(path, value, f"should be at least {node['minLength']} chars long")
    if "pattern" in node and not re.search(end_of_text(node["pattern"]), value):
        yield wrong(path, value, f"should match '{node['pattern']}'")
    if node.get("format") == "date-time" and not is_time(value):
        yield Cause(path, "FieldValueTypeInvalid", f'Invalid value: "{value}": must be of type date-time: "{value}"')


def _of_number(node: Node, value: float, path: str) -> Iterator[Cause]:
    if value < node.get("minimum", value):
        yield wrong(path, value, f"should be greater than or equal to {node['minimum']}")
    if value > node.get("maximum", value):
        yield wrong(path, value, f"should be less than or equal to {node['maximum']}")


def _of_object(node: Node, value: Node, path: str) -> Iterator[Cause]:
    if len(value) > node.get("maxProperties", len(value)):
        yield Cause(path, "FieldValueTooMany", f"Too many: must have at most {node['maxProperties']} items")
    for key in node.get("required", ()):
        if key not in value:
            yield required(f"{path}.{key}".lstrip("."))
    for key, item in value.items():
        if (child := _property(node, key)) is not None:
            yield from violations(child, item, f"{path}.{key}".lstrip("."))


def _of_list(node: Node, value: list[Any], path: str) -> Iterator[Cause]:
    if len(value) > node.get("maxItems", len(value)):
        yield Cause(path, "FieldValueTooMany", f"Too many: must have at most {node['maxItems']} items")
    if len(value) < node.get("minItems", 0):
        yield wrong(path, value, f"should have at least {node['minItems']} items")
    for index, item in enumerate(value):
        yield from violations(node["items"], item, f"{path}[{index}]")
    seen: list[tuple[Any, ...]] = []
    for index, item in enumerate(value if node.get("x-kubernetes-list-type") == "map" else ()):
        if isinstance(item, dict):
            key = tuple(item.get(name) for name in node["x-kubernetes-list-map-keys"])
            if key in seen:
                yield duplicate(f"{path}[{index}]", "/".join(map(str, key)))
            seen.append(key)


def broken_rules(node: Node, value: Any, old: Any, path: str) -> Iterator[Cause]:
    """CEL rules that do not hold. ``old``: the value before an update where the two correlate, else None."""
    for rule in node.get("x-kubernetes-validations", ()):
        if is_transition_rule(rule["rule"]) and old is None:
            continue
        try:
            holds = compile_rule(rule["rule"])({"self": value, "oldSelf": old}) is True
        except CelError as error:
            yield wrong(path or "<nil>", value, f"{error} evaluating rule: {rule['message']}")
            continue
        if not holds:
            yield Cause(path or "<nil>", "FieldValueInvalid", f'Invalid value: "object": {rule["message"]}')
    if isinstance(value, dict):
        for key, item in value.items():
            if (child := _property(node, key)) is not None:
                before = old.get(key) if isinstance(old, dict) else None
                yield from broken_rules(child, item, before, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and "items" in node:
        for index, item in enumerate(value):
            yield from broken_rules(node["items"], item, _correlated(node, item, old), f"{path}[{index}]")


def _correlated(node: Node, item: Any, old: Any) -> Any:
    """The element of the old list with the same keys; elements of other lists have no past."""
    if node.get("x-kubernetes-list-type") != "map" or not isinstance(old, list):
        return None
    keys = node["x-kubernetes-list-map-keys"]
    return next((before for before in old if all(before.get(key) == item.get(key) for key in keys)), None)


def causes(node: Node, value: Any, old: Any, path: str, before: list[Cause]) -> list[Cause]:
    """Everything wrong with an object; rules are only looked at when its shape is right. ``before``: of metadata."""
    found = [*before, *violations(node, value, path)]
    if any(cause.reason in _BLOCKING for cause in found):
        return [*found, _NOT_CHECKED]
    return [*found, *broken_rules(node, value, old, path)]
