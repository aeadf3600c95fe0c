"""A structural schema, compiled once, and what decoding does with it: unknown fields, nulls, defaults, numbers.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/ describes each step.
Only keywords that the project's CRD uses are understood; ``Schema.of`` refuses others rather than ignore them.
The checks are in ``structural.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ddpjob.cluster.memory.cel import compile_rule, is_transition_rule
from ddpjob.cluster.memory.celvalues import Expression

Node = Mapping[str, Any]

_KNOWN = frozenset(
    {
        *("type", "properties", "additionalProperties", "items", "required", "default", "description", "anyOf"),
        *("enum", "format", "pattern", "minLength", "maxLength", "minimum", "maximum"),
        *("minItems", "maxItems", "maxProperties"),
        *("x-kubernetes-int-or-string", "x-kubernetes-list-map-keys", "x-kubernetes-list-type"),
        *("x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    }
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
    has_scalar_checks: bool

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
            has_scalar_checks=bool(constraints),
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
