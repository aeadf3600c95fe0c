"""Reads a DDPJob as the API server does: unknown fields, nulls, numbers, defaults. By the models of ``ddpjob.api``."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddpjob.api.model import WireModel
from ddpjob.api.spec import field_path, message_of
from ddpjob.api.status import Condition, DDPJobStatus
from tests.worlds.memory.api_errors import Cause

_INT64 = 2**63
_NOT_IN_STATUS_SCHEMA = frozenset({"extra_forbidden", "string_too_long", "string_too_short", "time_type", "too_long"})


def strict_error(unknown: list[str]) -> str:
    """Return the API server's text for unknown fields."""
    return "strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in unknown)


def read_custom(model: type[WireModel], value: Any, path: str, findings: list[str]) -> tuple[Any, bool]:
    """Return a part of a DDPJob without nulls and with its defaults, or as it is if refused; and whether it is valid.

    Only unknown fields go into ``findings``: the API server decodes a custom resource without looking at types.
    """
    value = numbers(value)
    try:
        parsed = model.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        found = _refused(model, error)
        findings += [field_path(path, e["loc"]) for e in found if e["type"] == "extra_forbidden"]
        return value, not found
    return _with_defaults(parsed, value), True


def causes(model: type[WireModel], value: Any, path: str) -> list[Cause]:
    """Return what the CRD refuses in a part of a DDPJob, with the API server's fields."""
    try:
        model.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        return [Cause(_field_of(found, path), message_of(found)) for found in _refused(model, error)]
    return []


def _field_of(error: ErrorDetails, path: str) -> str:
    where = field_path(path, error["loc"])
    return f"{where}.{error['ctx']['field']}" if error["type"] == "duplicate" else where


def _refused(model: type[WireModel], error: ValidationError) -> list[ErrorDetails]:
    """Return the errors that the CRD has too. Its status has no enums and no limits, and accepts unknown fields."""
    found = error.errors(include_url=False)
    if model is not DDPJobStatus:
        return found
    return [item for item in found if not _is_open(item)]


def _is_open(error: ErrorDetails) -> bool:
    """Return whether the schema of the status accepts what the model refuses."""
    kind, location = error["type"], error["loc"]
    if kind == "missing" or error["input"] is None:  # the API server drops null, and requires the keys of a list
        return not (location[0] == "conditions" and location[-1] in Condition.list_keys)
    if kind == "literal_error":
        return isinstance(error["input"], str)
    return kind in _NOT_IN_STATUS_SCHEMA


def numbers(value: Any) -> Any:
    """Return JSON with numbers as Go reads them: 2.0 is the integer 2, an integer beyond 64 bits is a float."""
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


def _with_defaults(parsed: Any, given: Any) -> Any:
    """Return ``given``, in its own order, without nulls in declared fields and with the defaults of ``parsed``."""
    if isinstance(parsed, list):
        return [_with_defaults(*pair) for pair in zip(parsed, given, strict=True)]
    if not isinstance(parsed, WireModel):
        return parsed
    names = _declared(type(parsed))
    out = {}
    for key, item in given.items():
        if key not in names:
            out[key] = item
        elif item is not None:
            out[key] = _with_defaults(getattr(parsed, names[key]), item)
    for key, name in names.items():
        if key not in out and (value := getattr(parsed, name)) is not None:
            out[key] = value.wire() if isinstance(value, WireModel) else value
    return out


@cache
def _declared(model: type[WireModel]) -> Mapping[str, str]:
    """Return the name in Python of each of a model's fields, by its name in JSON."""
    return {str(info.alias): name for name, info in model.model_fields.items()}
