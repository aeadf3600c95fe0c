"""Base classes of all models of the resource: camelCase in JSON, instances immutable."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

T = TypeVar("T", bound=BaseModel)
_is_described = ContextVar("_is_described", default=True)


class Rule(NamedTuple):
    """One rule of the CRD, in CEL and in Python; a test compares the verdicts.

    holds: the check of a model. A rule of a single value, or of an edit, has none: its check is elsewhere.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None

    def wire(self) -> dict[str, str]:
        """Return the rule as the CRD contains it."""
        return {"rule": self.cel, "message": self.message}


class WireModel(BaseModel):
    """Base of the typed objects of the resource.

    ``list_keys``: the fields that identify an element in lists of this model (``x-kubernetes-list-type: map``).
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,  # like the API server, which refuses numNodes: "2"
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    list_keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add descriptions, CEL rules and list keys to the JSON schema; ``crd.py`` converts it for Kubernetes."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, description in descriptions(cls).items() if _is_described.get() else ():
            schema["properties"][cls.model_fields[name].alias].setdefault("description", description)
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.wire() for rule in cls.rules]
        if cls.list_keys:
            schema["x-list-keys"] = list(cls.list_keys)
        return schema

    def wire(self) -> dict[str, Any]:
        """Return the object as JSON: camelCase, without fields that are None."""
        return self.model_dump(by_alias=True, exclude_none=True)


@contextmanager
def without_descriptions() -> Iterator[None]:
    """Leave the descriptions out of JSON schemas: to read them takes as long as the rest of a command's start."""
    token = _is_described.set(False)
    try:
        yield
    finally:
        _is_described.reset(token)


@cache
def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings below the fields of a model, also of those that it inherits.

    pydantic's ``use_attribute_docstrings`` would parse every class when it is imported, a tenth of a command's start.
    """
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if not issubclass(part, WireModel):
            continue
        body = ast.parse(dedent(inspect.getsource(part))).body[0]
        for field, text in pairwise(getattr(body, "body", ())):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(value))):
                    if name in model.model_fields:
                        found[name] = inspect.cleandoc(value)
    return found


def unique_keys(model: T) -> T:
    """Return a model, all of whose keyed lists have elements with different keys. Raises ``PydanticCustomError``."""
    for name, value in model.__dict__.items():  # all declared fields; much faster than getattr for each
        if type(value) is not list or not value or not isinstance(value[0], WireModel):
            continue
        keys = [tuple(getattr(item, key) for key in type(item).list_keys) for item in value]
        if value[0].list_keys and len(set(keys)) < len(keys):
            index, twice = next((i, key) for i, key in enumerate(keys) if key in keys[:i])
            context = {"field": f"{to_camel(name)}[{index}]", "value": "/".join(map(str, twice))}
            raise PydanticCustomError("duplicate", "{field}: duplicate value {value}", context)
    return model


class ApiModel(WireModel):
    """A part of the spec: unknown fields and duplicate keys are refused, and null means absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Treat null in a declared field as absent, as the API server does."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        declared = {field.alias for field in cls.model_fields.values()}
        return {key: item for key, item in value.items() if item is not None or key not in declared}

    @model_validator(mode="after")
    def _keeps_rules(self) -> Self:
        unique_keys(self)
        for rule in self.rules:
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(rule.message)
        return self


class OpenModel(ApiModel):
    """A part of a Kubernetes object of which only some fields are declared; all others are passed on unchanged.

    CEL compares declared fields, so they are immutable on a live job; ``specHash`` detects changes of the others.
    """

    model_config = ConfigDict(extra="allow")

    def wire(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)


class StatusPart(WireModel):
    """Base of the models of the status: fields that another release declares are kept."""

    model_config = ConfigDict(extra="allow")

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values of these fields; None removes a field. The values are not validated."""
        if unknown := fields.keys() - self.__dict__.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        return self.model_copy(update=fields)
