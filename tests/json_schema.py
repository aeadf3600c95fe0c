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


def _type(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    wanted = schema["type"]
    if not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean"):
        yield f"{place}: {value!r} is no {wanted}"


def _enum(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    if value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"


def _const(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    if value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']!r}"


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


def _min_items(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
    if len(value) < schema["minItems"]:
        yield f"{place} has {len(value)} elements"


def _limit(
    keyword: str, kinds: type | tuple[type, ...], is_within: Callable[[Any, Any], bool]
) -> Callable[[Any, Json, Json, str], Iterator[str]]:
    """Return the check of a limit, which is for values of these types alone."""

    def check(value: Any, schema: Json, root: Json, place: str) -> Iterator[str]:
        if isinstance(value, kinds) and not is_within(value, schema[keyword]):
            yield f"{place}: {value!r} breaks {keyword} {schema[keyword]}"

    return check


_CHECKS: Mapping[str, Callable[[Any, Json, Json, str], Iterator[str]]] = {
    "$ref": _ref,
    "type": _type,
    "enum": _enum,
    "const": _const,
    "anyOf": _any_of,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "items": _items,
    "minItems": _min_items,
    "pattern": _limit("pattern", str, lambda value, pattern: re.search(pattern, value) is not None),
    "minimum": _limit("minimum", (int, float), lambda value, least: value >= least),
    "maximum": _limit("maximum", (int, float), lambda value, most: value <= most),
    "minLength": _limit("minLength", str, lambda value, least: len(value) >= least),
    "maxLength": _limit("maxLength", str, lambda value, most: len(value) <= most),
    "maxItems": _limit("maxItems", list, lambda value, most: len(value) <= most),
    "maxProperties": _limit("maxProperties", dict, lambda value, most: len(value) <= most),
}
