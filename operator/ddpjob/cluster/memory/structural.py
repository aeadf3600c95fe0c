"""What the API server does with a custom resource and its structural schema: unknown fields, nulls, defaults, checks.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/ describes each step.
Only keywords that the project's CRD uses are understood; ``Schema.of`` refuses others rather than ignore them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ddpjob.cluster.memory.answers import Cause, duplicate, required, unsupported, wrong
from ddpjob.cluster.memory.cel import compile_rule, is_transition_rule
from ddpjob.cluster.memory.celvalues import CelError, Expression, end_of_text
from ddpjob.cluster.memory.formats import is_time

Node = Mapping[str, Any]

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
_INT64 = 2**63


@dataclass(frozen=True)
class Rule:
    """A CEL rule, ready to be asked."""

    holds: Expression
    message: str
    compares: bool
    """Whether it compares with the value before, and so holds of updates alone."""

    @classmethod
    def of(cls, rule: Mapping[str, str]) -> Self:
        return cls(compile_rule(rule["rule"]), rule["message"], is_transition_rule(rule["rule"]))


@dataclass(frozen=True)
class Schema:
    """One node of a structural schema with its children. ``of`` makes the whole tree, once."""

    node: Node
    type: str
    properties: Mapping[str, "Schema"]
    additional: "Schema | None"
    items: "Schema | None"
    keeps_unknown: bool
    keys: tuple[str, ...]
    """Fields that tell the elements of a list apart; empty where they need not differ."""
    rules: tuple[Rule, ...]
    has_rules: bool
    """Whether this node or one below it has rules."""
    check_scalar: "Callable[[Schema, Any, str], list[Cause]] | None"

    @classmethod
    def of(cls, node: Node) -> Self:
        """Raises ``NotImplementedError`` for a keyword that would otherwise be ignored."""
        if unknown := node.keys() - _KNOWN:
            raise NotImplementedError(f"schema keyword not implemented: {', '.join(sorted(unknown))}")
        properties = {name: cls.of(child) for name, child in node.get("properties", {}).items()}
        additional = cls.of(node["additionalProperties"]) if "additionalProperties" in node else None
        items = cls.of(node["items"]) if "items" in node else None
        rules = tuple(Rule.of(rule) for rule in node.get("x-kubernetes-validations", ()))
        below = [child for child in (*properties.values(), additional, items) if child is not None]
        is_map = node.get("x-kubernetes-list-type") == "map"
        constraints = node.keys() & {"enum", "pattern", "minLength", "maxLength", "format", "minimum", "maximum"}
        return cls(
            node=node,
            type="integer or string" if node.get("x-kubernetes-int-or-string") else node.get("type", ""),
            properties=properties,
            additional=additional,
            items=items,
            keeps_unknown=bool(node.get("x-kubernetes-preserve-unknown-fields")) or additional is not None,
            keys=tuple(node["x-kubernetes-list-map-keys"]) if is_map else (),
            rules=rules,
            has_rules=bool(rules) or any(child.has_rules for child in below),
            check_scalar=_scalar_causes if constraints else None,
        )

    def child(self, key: str) -> "Schema | None":
        return self.properties.get(key, self.additional)


def read(schema: Schema, value: Any, path: str, unknown: list[str]) -> Any:
    """``value`` without nulls in known fields, with defaults, with numbers as Go's JSON has them.

    Paths of fields that the schema does not know are added to ``unknown``, in the order of the document.
    """
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, item in value.items():
            child = schema.child(key)
            if child is None:
                out[key] = numbers(item)
                if not schema.keeps_unknown:
                    unknown.append(f"{path}.{key}" if path else key)
            elif item is not None:
                out[key] = read(child, item, f"{path}.{key}" if path else key, unknown)
        for key, child in schema.properties.items():
            if "default" in child.node and key not in out:
                out[key] = read(child, child.node["default"], "", unknown)
        return out
    if isinstance(value, list) and schema.items is not None:
        return [read(schema.items, item, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    return numbers(value)


def numbers(value: Any) -> Any:
    """2.0 is the integer 2, and an integer of more than 64 bits is a float."""
    kind = type(value)
    if kind is dict:
        return {key: numbers(item) for key, item in value.items()}
    if kind is list:
        return [numbers(item) for item in value]
    if kind is float and value.is_integer() and abs(value) < _INT64:
        return int(value)
    if kind is int and not -_INT64 <= value < _INT64:
        return float(value)
    return value


def violations(schema: Schema, value: Any, path: str, found: list[Cause]) -> None:
    """Add what is wrong with ``value``, rules in CEL apart, to ``found``."""
    kind = type(value)
    if schema.type and kind not in _FITTING[schema.type]:
        name = "null" if value is None else _TYPE_NAMES[kind]
        message = f'Invalid value: "{name}": must be of type {schema.type}: "{name}"'
        found.append(Cause(path, "FieldValueTypeInvalid", message))
        if kind not in (int, float):
            return
    if schema.check_scalar is not None:
        found += schema.check_scalar(schema, value, path)
    if kind is dict:
        _object(schema, value, path, found)
    elif kind is list:
        _list(schema, value, path, found)


def _scalar_causes(schema: Schema, value: Any, path: str) -> list[Cause]:
    node = schema.node
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
