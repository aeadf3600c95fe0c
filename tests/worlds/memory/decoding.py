"""Decodes a request's body as the API server does: unknown fields, wrong types, nulls, numbers, defaults of a DDPJob.

DDPJobs are read by the models of ``ddpjob.api``. Kubernetes' own kinds are read by validators that are built from
the official client's models, so that their field names and types are listed nowhere here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, SchemaValidator, core_schema

from ddpjob.api.model import WireModel
from ddpjob.api.spec import field_path, message_of
from ddpjob.api.status import Condition, DDPJobStatus
from ddpjob.api.time_spent import is_time
from ddpjob.api.times import timestamp
from tests.worlds.memory.api_errors import Cause
from tests.worlds.memory.quantities import canonical

_INT64 = 2**63

# The client's models do not show which fields are pointers in Go. The API server keeps the empty value of a pointer
# and leaves out the empty value of any other field.
_KEPT_EMPTY = frozenset({"storageClassName", "volumeMode", "runtimeClassName", "ipFamilyPolicy"})
_DROPPED_EMPTY = frozenset(
    {
        *("hostNetwork", "hostPID", "hostIPC", "stdin", "stdinOnce", "tty", "readOnly", "publishNotReadyAddresses"),
        *("hostPort", "nodePort", "signal", "count", "generation", "observedGeneration", "healthCheckNodePort"),
    }
)
_QUANTITIES = frozenset({"sizeLimit", "divisor"})
_QUANTITY_MAPS = frozenset({"limits", "requests", "overhead", "capacity", "allocatedResources"})
_MICRO_TIMES = frozenset({"eventTime", "lastObservedTime"})

_NOT_IN_STATUS_SCHEMA = frozenset({"extra_forbidden", "string_too_long", "string_too_short", "time_type", "too_long"})


@dataclass
class Findings:
    """What decoding refuses: the paths of unknown fields, and the first value of a wrong type."""

    unknown: list[str] = field(default_factory=list)
    mistyped: str = ""

    def __bool__(self) -> bool:
        return bool(self.unknown or self.mistyped)

    def __str__(self) -> str:
        """Return the API server's text for it."""
        unknown = ", ".join(f'unknown field "{path}"' for path in self.unknown)
        return self.mistyped or f"strict decoding error: {unknown}"


def read_custom(model: type[WireModel], value: Any, path: str, findings: Findings) -> tuple[Any, bool]:
    """Return a part of a DDPJob without nulls and with its defaults, or as it is if refused; and whether it is valid.

    Only unknown fields go into ``findings``: the API server decodes a custom resource without looking at types.
    """
    value = numbers(value)
    try:
        parsed = model.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        found = _refused(model, error)
        findings.unknown += [field_path(path, e["loc"]) for e in found if e["type"] == "extra_forbidden"]
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


def read_core(model: str, value: Any, path: str, findings: Findings) -> Any:
    """Return an object of one of the client's models as the API server would return it, or as it is if refused."""
    try:
        return _read_model(model, value)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            where = field_path(path, found["loc"]).removeprefix(".")
            if found["type"] == "extra_forbidden":
                findings.unknown.append(where)
            else:
                findings.mistyped = findings.mistyped or f"{where}: {message_of(found)}"
        return value


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


def _read_model(model: str, value: Any) -> Any:
    """Return a validated object in the order of the body, without nulls and without empty values that mean none."""
    validator, dropped_empty = _validator(model)
    found = validator.validate_python(value)
    return {key: item for key in value if (item := found[key]) or (item is not None and key not in dropped_empty)}


@cache
def _validator(model: str) -> tuple[SchemaValidator, frozenset[str]]:
    """Return the validator of one of the client's models, and the fields whose empty value means none.

    The client imports each model on first use, which takes milliseconds, so nested models get validators of their own.
    """
    from kubernetes.aio.client import models  # noqa: PLC0415 - slow, and only needed once an object is read

    cls = getattr(models, model)
    kinds: dict[str, str] = {cls.attribute_map[name]: kind for name, kind in cls.openapi_types.items()}
    fields = {}
    for key, kind in kinds.items():
        schema = core_schema.nullable_schema(_field(key, kind))
        fields[key] = core_schema.typed_dict_field(schema, required=False)
    shape = core_schema.typed_dict_schema(fields, extra_behavior="forbid", strict=True)
    return SchemaValidator(shape), frozenset(key for key, kind in kinds.items() if _is_dropped_empty(key, kind))


def _field(key: str, kind: str) -> CoreSchema:
    """Return the schema of a field. The client writes types as ``str``, ``List[V1EnvVar]``, ``Dict[str, str]``."""
    outer, _, inner = kind.removesuffix("]").partition("[")
    if key in _QUANTITIES:
        return core_schema.no_info_plain_validator_function(_quantity)
    if outer == "List":
        items = core_schema.list_schema(_field("", inner), strict=True)
        return _replacing_nulls("" if inner == "str" else {}, items)
    if outer == "Dict":
        # The API server rounds the quantities of resource lists to thousandths.
        rounded = core_schema.no_info_plain_validator_function(partial(_quantity, finest=-3))
        is_quantity_map = key in _QUANTITY_MAPS
        values = rounded if is_quantity_map else _field("", inner.removeprefix("str, "))
        return _replacing_nulls("0" if is_quantity_map else "", core_schema.dict_schema(values_schema=values))
    if kind == "datetime":
        return core_schema.no_info_plain_validator_function(partial(_time, micro=key in _MICRO_TIMES))
    if kind in _SCALARS:
        return _SCALARS[kind]
    return core_schema.no_info_plain_validator_function(partial(_read_model, kind))


def _is_dropped_empty(key: str, kind: str) -> bool:
    """Return whether the empty value of a field means the same as none."""
    return key in _DROPPED_EMPTY or (kind.startswith(("str", "List", "Dict")) and key not in _KEPT_EMPTY)


def _replacing_nulls(empty: Any, schema: CoreSchema) -> CoreSchema:
    """Return the schema of a list or map in which null elements mean ``empty``."""

    def replace(value: Any) -> Any:
        if isinstance(value, list):
            return [empty if item is None else item for item in value]
        if isinstance(value, dict):
            return {key: empty if item is None else item for key, item in value.items()}
        return value

    return core_schema.no_info_before_validator_function(replace, schema)


def _quantity(value: Any, *, finest: int = -9) -> str:
    try:
        return canonical(value, finest=finest)
    except ValueError:
        message = "quantities must be a number with an optional suffix, such as 500m or 16Gi"
        raise PydanticCustomError("quantity_type", message) from None


def _int_or_string(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("int_or_string_type", "must be an integer or a string")
    return value


def _time(value: Any, *, micro: bool) -> str:
    """Return a time as the API server returns it: in UTC, to the second or microsecond."""
    if not isinstance(value, str) or not is_time(value):
        raise PydanticCustomError("time_type", "must be a time of RFC 3339, for example 2026-03-01T12:00:00Z")
    moment = datetime.fromisoformat(value.upper()).astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if micro else timestamp(moment)


_SCALARS: Final[Mapping[str, CoreSchema]] = {
    "str": core_schema.str_schema(strict=True),
    "int": core_schema.int_schema(strict=True),
    "bool": core_schema.bool_schema(strict=True),
    "object": core_schema.no_info_plain_validator_function(_int_or_string),
}
