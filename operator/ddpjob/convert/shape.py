"""Checks that a source has the form of its kind, so that a conversion can rely on it."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ddpjob.api.objects import Json
from ddpjob.api.pods import PodTemplate
from ddpjob.api.spec import field_path, message_of
from ddpjob.engine.merge import template_faults
from ddpjob.errors import InvalidJobError

Shape = Any
"""A type, a list with the shape of its items, or a dict with the shapes of its fields; ``*`` is any other field."""


def require_shape(value: Any, shape: Shape, path: str) -> None:
    """Raise ``InvalidJobError`` for the first value that has another form; null and unknown fields have any."""
    if value is None:
        return
    if isinstance(shape, dict):
        _require(isinstance(value, dict), path, "a mapping")
        for key, inner in value.items():
            if (below := shape.get(key, shape.get("*"))) is not None:
                require_shape(inner, below, f"{path}.{key}".removeprefix("."))
    elif isinstance(shape, list):
        _require(isinstance(value, list), path, "a list")
        for index, inner in enumerate(value):
            require_shape(inner, shape[0], f"{path}[{index}]")
            _require(inner is not None, f"{path}[{index}]", "a value")
    else:
        _require(isinstance(value, shape) and not (isinstance(value, bool) and shape is int), path, f"{shape.__name__}")


def require_pod_template(template: Any, path: str) -> Json:
    """Return a pod template without null fields. Raises ``InvalidJobError`` if it has not the form of one."""
    require_shape(template, {"metadata": dict, "spec": dict}, path)
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
