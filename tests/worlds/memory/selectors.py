"""Label and field selectors, parsed and matched as by the API server.

Grammar: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors. A requirement is
``key`` (exists), ``!key`` (does not exist), or a key with ``=``, ``==``, ``!=``, ``in``, ``notin``, ``>``, ``<``.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.worlds.memory.api_errors import bad_request
from tests.worlds.memory.validation import is_label_value, is_qualified_name

Matcher = Callable[[Json], bool]

_COMMA = re.compile(r",(?![^(]*\))")  # not one in parentheses
_WORD = r"[^\s=!(),<>]+"
_REQUIREMENT = re.compile(
    rf"\s*(?:!\s*(?P<absent>{_WORD})"
    rf"|(?P<key>{_WORD})(?:\s*(?P<operator>==|=|!=|<|>)\s*(?P<value>(?:{_WORD})?)"
    rf"|\s+(?P<set_operator>in|notin)\s*\((?P<values>[^=!()<>]*)\))?)\s*"
)
_FORMS = "KEY, !KEY, KEY=VALUE, KEY!=VALUE, KEY in (VALUE,...), KEY notin (VALUE,...), KEY>NUMBER or KEY<NUMBER"
_NUMBER = re.compile(r"[+-]?\d+")

# Fields that can be selected, by kind, in addition to metadata.name and metadata.namespace.
_FIELDS: Mapping[Resource, tuple[str, ...]] = {
    names.PODS: (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
    ),
    names.EVENTS: ("involvedObject.uid", "reason", "type"),
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
            case "=" | "==" | "in":
                return value in self.values
            case "!=" | "notin":
                return value not in self.values
        if value is None or not _NUMBER.fullmatch(value):
            return False
        bound = int(next(iter(self.values)))
        return int(value) > bound if self.operator == ">" else int(value) < bound


def label_matcher(selector: str | None) -> Matcher:
    """Return a function that matches objects by label; an empty selector matches all. Raises ``Invalid`` (400)."""
    terms = _COMMA.split(selector) if selector and selector.strip() else []
    requirements = [_requirement(term) for term in terms]

    def matches(obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(requirement.matches(labels) for requirement in requirements)

    return matches


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


def _field(obj: Json, path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return str(value) if value != {} else ""


def _requirement(term: str) -> _Requirement:
    found = _REQUIREMENT.fullmatch(term)
    if found is None:
        raise bad_request(f"unable to parse requirement: '{term.strip()}' is none of {_FORMS}")
    key = found["absent"] or found["key"]
    if not is_qualified_name(key):
        raise bad_request(f'unable to parse requirement: <nil>: Invalid value: "{key}": not a label key')
    if found["set_operator"]:
        operator = found["set_operator"]
        values = frozenset(value.strip() for value in found["values"].split(","))
    elif found["operator"]:
        operator, values = found["operator"], frozenset({found["value"]})
    else:
        return _Requirement(key, "!" if found["absent"] else "exists")
    for value in values:
        if operator in "<>" and not _NUMBER.fullmatch(value):
            raise bad_request(f'unable to parse requirement: values[0][{key}]: "{value}": not an integer')
        if not is_label_value(value):
            raise bad_request(
                f'unable to parse requirement: values[0][{key}]: Invalid value: "{value}": not a label value'
            )
    return _Requirement(key, operator, values)
