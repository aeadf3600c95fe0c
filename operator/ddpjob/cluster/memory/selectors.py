"""Label and field selectors, parsed and matched as by the API server.

Grammar: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors. A requirement is
``key`` (exists), ``!key`` (does not exist), or a key with ``=``, ``==``, ``!=``, ``in``, ``notin``, ``>``, ``<``.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.memory.api_errors import bad_request
from ddpjob.cluster.memory.validation import is_label_value, is_qualified_name

Matcher = Callable[[Json], bool]

_TOKEN = re.compile(r"\s*(==|!=|=|!|\(|\)|,|>|<|[^\s=!(),<>]+)")
_OPERATORS = {"=": "in", "==": "in", "in": "in", "!=": "notin", "notin": "notin", ">": ">", "<": "<"}
_SPECIAL = frozenset(["=", "==", "!=", "!", "(", ")", ",", ">", "<"])
_END = ""

# Fields that can be selected, by kind, in addition to metadata.name and metadata.namespace.
_FIELDS: Mapping[Resource, tuple[str, ...]] = {
    names.PODS: ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase")
}


class _Requirement(NamedTuple):
    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "exists":
                return value is not None
            case "!":
                return value is None
            case "in":
                return value in self.values
            case "notin":
                return value is None or value not in self.values
        if value is None or not re.fullmatch(r"[+-]?\d+", value):
            return False
        bound = int(next(iter(self.values)))
        return int(value) > bound if self.operator == ">" else int(value) < bound


def label_matcher(selector: str | None) -> Matcher:
    """Return a function that matches objects by label; an empty selector matches all. Raises ``Invalid`` (400)."""
    requirements = _Parser(selector or "").parse()
    if not requirements:
        return lambda obj: True
    return lambda obj: _all(requirements, obj["metadata"].get("labels") or {})


def field_matcher(resource: Resource, selector: str | None) -> Matcher:
    """Return a function that matches objects by field, with ``=``, ``==``, ``!=``. Raises ``Invalid`` (400)."""
    wanted: list[tuple[str, str, bool]] = []
    for term in (selector or "").split(","):
        if not term.strip():
            continue
        found = re.fullmatch(r"\s*([^=!]*?)\s*(==|!=|=)\s*(.*?)\s*", term)
        if found is None:
            raise bad_request(f"invalid selector: '{selector}'; can't understand '{term}'")
        path, operator, value = found.groups()
        if path not in ("metadata.name", "metadata.namespace", *_FIELDS.get(resource, ())):
            raise bad_request(f"field label not supported: {path}")
        wanted.append((path, value, operator != "!="))
    return lambda obj: all((_field(obj, path) == value) is equal for path, value, equal in wanted)


def _all(requirements: list[_Requirement], labels: Mapping[str, str]) -> bool:
    return all(requirement.matches(labels) for requirement in requirements)


def _field(obj: Json, path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return str(value) if value != {} else ""


class _Parser:
    """Parses a label selector in one pass. Raises ``Invalid`` (400) with the token found and those expected."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        self._position = 0

    def parse(self) -> list[_Requirement]:
        requirements: list[_Requirement] = []
        while self._peek() != _END:
            requirements.append(self._requirement())
            part = self._next()
            if part == _END:
                break
            if part != ",":
                raise bad_request(f"found '{part}', expected: ',' or 'end of string'")
            if self._peek() == _END:
                raise bad_request("found '', expected: identifier after ','")
        return requirements

    def _requirement(self) -> _Requirement:
        absent = self._peek() == "!"
        if absent:
            self._next()
        key = self._next()
        if key in _SPECIAL or key == _END:
            raise bad_request(f"found '{key}', expected: !, identifier, or 'end of string'")
        if not is_qualified_name(key):
            raise bad_request(f'unable to parse requirement: <nil>: Invalid value: "{key}": not a label key')
        if absent:
            return _Requirement(key, "!")
        if self._peek() in (_END, ","):
            return _Requirement(key, "exists")
        part = self._next()
        if part not in _OPERATORS:
            raise bad_request(f"unable to parse requirement: found '{part}', expected: in, notin, =, ==, !=, gt, lt")
        values = self._values() if part in ("in", "notin") else frozenset({self._exact_value()})
        return self._checked(_Requirement(key, _OPERATORS[part], values))

    def _exact_value(self) -> str:
        if self._peek() in (_END, ","):
            return ""
        part = self._next()
        if part in _SPECIAL:
            raise bad_request(f"unable to parse requirement: found '{part}', expected: identifier")
        return part

    def _values(self) -> frozenset[str]:
        if (part := self._next()) != "(":
            raise bad_request(f"unable to parse requirement: found '{part}' expected: '('")
        values: set[str] = set()
        while True:
            if self._peek() in (",", ")"):
                values.add("")
            else:
                part = self._next()
                if part in _SPECIAL or part == _END:
                    raise bad_request(f"unable to parse requirement: found '{part}', expected: ',', ')' or identifier")
                values.add(part)
            part = self._next()
            if part == ")":
                return frozenset(values)
            if part != ",":
                raise bad_request(f"unable to parse requirement: found '{part}', expected: ',' or ')'")

    def _checked(self, requirement: _Requirement) -> _Requirement:
        for value in requirement.values:
            if requirement.operator in "<>" and not re.fullmatch(r"[+-]?\d+", value):
                raise bad_request(
                    f'unable to parse requirement: values[0][{requirement.key}]: "{value}": not an integer'
                )
            if not is_label_value(value):
                message = f'values[0][{requirement.key}]: Invalid value: "{value}": not a label value'
                raise bad_request(f"unable to parse requirement: {message}")
        return requirement

    def _peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    def _next(self) -> str:
        part = self._peek()
        self._position += 1
        return part
