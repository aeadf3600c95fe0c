"""The fields of a source, walked by a table: their form, what carries over, and the notes on what does not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ddpjob.api.objects import Json
from ddpjob.api.pods import PodTemplate
from ddpjob.api.spec import field_path, message_of
from ddpjob.engine.merge import template_faults
from ddpjob.errors import InvalidJobError

Shape = Any
"""A type, a list with the shape of its items, or a dict with the shapes of its fields; ``*`` is any other field."""
ANY: Shape = object
_REFERENCE = "docs/reference/fields.md lists the fields of a DDPJob"


@dataclass(frozen=True)
class Difference:
    """A field of the source that does not carry over as it is.

    field: its path in the source. why: what is different in a DDPJob. action: what to do; empty if nothing.
    """

    field: str
    why: str
    action: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.why}" + (f"; {self.action}" if self.action else "")


@dataclass(frozen=True)
class Kept:
    """A field that a DDPJob has, too, with the same name and meaning."""

    shape: Shape


@dataclass(frozen=True)
class Left:
    """A field that is noted, because a DDPJob has none like it."""

    why: str
    action: str = ""
    shape: Shape = ANY


def walk(value: Any, shape: Shape, path: str, notes: list[Difference]) -> Json:
    """Return the fields that are ``Kept``; note those that are ``Left`` or that the shape does not know.

    Raises ``InvalidJobError`` for the first value that has another form; null has any.
    """
    kept: Json = {}
    if value is None:
        return kept
    if isinstance(shape, Left):
        walk(value, shape.shape, path, notes)
        if value not in ({}, [], ""):
            notes.append(Difference(path, shape.why, shape.action))
    elif isinstance(shape, dict):
        _require(isinstance(value, dict), path, "a mapping")
        for key, inner in value.items():
            below = shape.get(key, shape.get("*", Left("this field is not known here", _REFERENCE)))
            if isinstance(below, Kept):
                walk(inner, below.shape, f"{path}.{key}", notes)
                kept |= {} if inner is None or inner is False else {key: inner}
            else:
                kept |= walk(inner, below, f"{path}.{key}".removeprefix("."), notes)
    elif isinstance(shape, list):
        _require(isinstance(value, list), path, "a list")
        for index, inner in enumerate(value):
            name = inner.get("name") if isinstance(inner, dict) else None
            where = f"{path}[{index if name is None else name}]"
            _require(inner is not None, where, "a value")
            kept |= walk(inner, shape[0], where, notes)
    else:
        is_flag = isinstance(value, bool) and shape is int
        _require(isinstance(value, shape) and not is_flag, path, shape.__name__)
    return kept


def require_pod_template(template: Any, path: str) -> Json:
    """Return a pod template without null fields. Raises ``InvalidJobError`` if it has not the form of one."""
    walk(template, {"metadata": dict, "spec": dict, "*": ANY}, path, [])
    given = {key: value for key, value in (template or {}).items() if value is not None}
    for container in _containers(given.get("spec") or {}):
        _as_ddpjobs_have_it(container)
    try:
        found: Json = PodTemplate.model_validate(given, by_alias=True, by_name=False).wire()
    except ValidationError as error:
        wrong = error.errors()[0]
        raise _wrong(field_path(path, wrong["loc"]), message_of(wrong)) from error
    for fault in template_faults(found):
        field, _, message = fault.partition(": ")
        raise _wrong(f"{path}{field.removeprefix('spec.template')}", message)
    return found


def _containers(pod: Json) -> Iterator[Json]:
    for kind in ("containers", "initContainers"):
        given = pod.get(kind)
        yield from (one for one in (given if isinstance(given, list) else ()) if isinstance(one, dict))


def _as_ddpjobs_have_it(container: Json) -> None:
    """Write what Kubernetes accepts in the form that a DDPJob has: each variable once, and no fractions as numbers."""
    env = container.get("env")
    if isinstance(env, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in env):
        container["env"] = list({one["name"]: one for one in env}.values())  # the last one counts
    resources = container.get("resources")
    for kind in ("limits", "requests"):
        amounts = resources.get(kind) if isinstance(resources, dict) else None
        if isinstance(amounts, dict):
            amounts |= {name: str(amount) for name, amount in amounts.items() if isinstance(amount, float)}


def _require(holds: bool, path: str, what: str) -> None:
    if not holds:
        raise _wrong(path, f"it must be {what}")


def _wrong(path: str, message: str) -> InvalidJobError:
    return InvalidJobError(
        f"{path}: {message}", "it has not the form that its kind has, or that a DDPJob allows", "correct the field"
    )
