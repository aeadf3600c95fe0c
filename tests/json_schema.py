"""Whether a JSON value fits a JSON schema, of which the keywords are known that the project's own schemas use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpjob.api.objects import Json

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SAY_NOTHING = frozenset({"$schema", "$defs", "title", "description", "default", "format"})


def faults(value: Any, schema: Json, root: Json | None = None, place: str = "$") -> Iterator[str]:
    """Yield where a value does not fit. Raises ``KeyError`` for a keyword that is not known here."""
    for keyword in schema.keys() - _SAY_NOTHING:
        yield from _CHECKS[keyword](value, schema, schema if root is None else root, place)


def _ref(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    return faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, place)


def _any_of(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    if all(any(faults(value, option, root, place)) for option in schema["anyOf"]):
        yield f"{place}: {value!r} fits none of {len(schema['anyOf'])} schemas"


def _properties(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    for key in value.keys() & schema["properties"].keys():
        yield from faults(value[key], schema["properties"][key], root, f"{place}.{key}")


def _required(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    return (f"{place}: {key} is missing" for key in schema["required"] if key not in value)


def _additional(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    others = value.keys() - schema.get("properties", {}).keys()
    match schema["additionalProperties"]:
        case False:
            yield from (f"{place}: {key} is unknown" for key in others)
        case dict() as wanted:
            for key in others:
                yield from faults(value[key], wanted, root, f"{place}.{key}")


def _items(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    for number, item in enumerate(value):
        yield from faults(item, schema["items"], root, f"{place}[{number}]")


def _rule(
    keyword: str, kinds: type | tuple[type, ...], holds: Callable[[Any, Any], bool]
) -> Callable[[Any, Json, Json, str], Iterator[str]]:
    """Return the check of a keyword that is for values of these types alone."""

    def check(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
        if isinstance(value, kinds) and not holds(value, schema[keyword]):
            yield f"{place}: {value!r} breaks {keyword} {schema[keyword]}"

    return check


def _is_a(value: Any, wanted: str) -> bool:
    return isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))


_CHECKS: Mapping[str, Callable[[Any, Json, Json, str], Iterator[str]]] = {
    "$ref": _ref,
    "anyOf": _any_of,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "items": _items,
} | {
    keyword: _rule(keyword, kinds, holds)
    for keyword, kinds, holds in (
        ("type", object, _is_a),
        ("enum", object, lambda value, values: value in values),
        ("const", object, lambda value, only: value == only),
        ("pattern", str, lambda value, pattern: re.search(pattern, value) is not None),
        ("minimum", (int, float), lambda value, least: value >= least),
        ("maximum", (int, float), lambda value, most: value <= most),
        ("minLength", str, lambda value, least: len(value) >= least),
        ("maxLength", str, lambda value, most: len(value) <= most),
        ("minItems", list, lambda value, least: len(value) >= least),
        ("maxItems", list, lambda value, most: len(value) <= most),
        ("maxProperties", dict, lambda value, most: len(value) <= most),
    )
}
