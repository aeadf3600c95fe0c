"""The values and operations of CEL rules: each function returns a function of the rule's variables.

``cel.py`` reads a rule and puts these together. An operation that does not fit its values raises ``CelError``.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]
Function = Callable[..., Any]


class CelError(Exception):
    """Evaluation failed, a field that is not there for example: the rule counts as broken."""


class UnsupportedRuleError(Exception):
    """The rule uses something outside the subset above."""


@cache
def end_of_text(pattern: str) -> str:
    """A pattern of Go's RE2 for Python: there ``$`` is the end of the text, here also the newline before it."""
    return re.sub(r"(?<!\\)\$(?=$|\))", r"\\Z", pattern)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _size(value: Any) -> int:
    if isinstance(value, str | list | dict):
        return len(value)
    raise CelError("no such overload: size")


METHODS: Mapping[str, Callable[..., Any]] = {
    "matches": lambda text, pattern: re.search(end_of_text(pattern), text) is not None,
    "split": lambda text, separator: text.split(separator),
    "startsWith": lambda text, prefix: text.startswith(prefix),
    "endsWith": lambda text, suffix: text.endswith(suffix),
    "contains": lambda text, part: part in text,
    "size": _size,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {"size": _size, "type": type, "int": int, "string": str}


class Selection:
    """``value.name``; a class, so that ``has`` can ask for presence instead of the value."""

    def __init__(self, value: Expression, name: str) -> None:
        self._value, self._name = value, name

    def __call__(self, scope: Scope) -> Any:
        value = self._value(scope)
        if not isinstance(value, dict) or self._name not in value:
            raise CelError(f"no such key: {self._name}")
        return value[self._name]

    def is_present(self, scope: Scope) -> bool:
        value = self._value(scope)
        return isinstance(value, dict) and self._name in value


def select(value: Expression, name: str) -> Expression:
    return Selection(value, name)


def presence(selection: Expression) -> Expression:
    if not isinstance(selection, Selection):
        raise UnsupportedRuleError("has() takes a field selection")
    return selection.is_present


def number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CelError("no such overload: a condition must be a bool")
    return value


def relation(operator: str, left: Expression, right: Expression) -> Expression:
    def evaluate(scope: Scope) -> bool:
        a, b = left(scope), right(scope)
        match operator:
            case "==":
                return _equal(a, b)
            case "!=":
                return not _equal(a, b)
            case "in":
                return any(_equal(a, item) for item in b)
        try:
            return bool({"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[operator])
        except TypeError as error:
            raise CelError(f"no such overload: {operator}") from error

    return evaluate


def total(operator: str, left: Expression, right: Expression) -> Expression:
    def evaluate(scope: Scope) -> Any:
        a, b = left(scope), right(scope)
        return a + b if operator == "+" else a - b

    return evaluate


def index(value: Expression, key: Expression) -> Expression:
    def evaluate(scope: Scope) -> Any:
        try:
            return value(scope)[key(scope)]
        except (LookupError, TypeError) as error:
            raise CelError(f"no such key: {error}") from error

    return evaluate


def apply(function: Callable[..., Any], arguments: list[Expression]) -> Expression:
    def evaluate(scope: Scope) -> Any:
        try:
            return function(*(argument(scope) for argument in arguments))
        except (AttributeError, TypeError, ValueError) as error:
            raise CelError(f"no such overload: {error}") from error

    return evaluate


def macro(name: str, target: Expression, variable: str, body: Expression) -> Expression:
    def evaluate(scope: Scope) -> Any:
        items = list(target(scope))
        if name == "map":
            return [body({**scope, variable: item}) for item in items]
        held: list[Any] = []
        error: CelError | None = None
        for item in items:
            try:
                held += [item] if truth(body({**scope, variable: item})) else []
            except CelError as raised:
                error = raised
        decided = held if name == "exists" else len(held) < len(items) - (error is not None)
        if error is not None and not (name in ("exists", "all") and decided):
            raise error
        outcomes = {"exists": bool(held), "all": len(held) == len(items), "exists_one": len(held) == 1}
        return held if name == "filter" else outcomes[name]

    return evaluate
