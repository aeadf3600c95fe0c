"""Checks of the spec of a ``DDPJob``: of a whole object, and of keyword arguments.

Apart from ``job``, because listing the jobs of a cluster checks none: importing the models of the spec takes as long as
the request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpjob.api.objects import Json
from ddpjob.api.spec import NAME_RULE, DDPJobSpec, explain, is_job_name, parse_spec
from ddpjob.errors import InvalidJobError, did_you_mean

_REFERENCE = "docs/fields.md lists every field and what it may hold"
_CORRECT = "correct the field"


def require_valid(manifest: Json) -> None:
    """Raise ``InvalidJobError`` if the name or a field of a DDPJob is wrong."""
    name = (manifest.get("metadata") or {}).get("name")
    if not name or not isinstance(name, str) or not is_job_name(name):
        raise InvalidJobError(
            f"metadata.name is {name!r}" if name else "metadata.name is missing",
            NAME_RULE.message,
            "give the job another name" if name else "give the job a name",
        )
    try:
        parse_spec(manifest)
    except ValidationError as error:
        raise InvalidJobError(
            f"the DDPJob {name} is wrong: {'; '.join(explain(error))}", _REFERENCE, _CORRECT
        ) from error


def spec_of(name: str, given: Mapping[str, Any]) -> Json:
    """Return the spec as JSON, with the names of the API. Raises ``InvalidJobError``."""
    fields = {text for key, field in DDPJobSpec.model_fields.items() for text in (key, field.alias or key)}
    for key in given:
        if key not in fields:
            hint = did_you_mean(key, sorted(fields), _REFERENCE)
            raise InvalidJobError(f'a DDPJob has no field "{key}"', hint, "options of the trainer belong into args")
    values: dict[str, Any] = {key: _json(value) for key, value in given.items() if value is not None}
    if isinstance(values.get("env"), dict):
        values["env"] = [{"name": key, "value": value} for key, value in values["env"].items()]
    try:
        spec = DDPJobSpec.model_validate(values, by_alias=True, by_name=True)
    except ValidationError as error:
        raise InvalidJobError(
            f"the DDPJob {name} is wrong: {'; '.join(explain(error))}", _REFERENCE, _CORRECT
        ) from error
    return spec.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)


def _json(value: Any) -> Any:
    """Return a value as JSON has it: a tuple as a list, and a model as its fields."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json(item) for item in value]
    return value
