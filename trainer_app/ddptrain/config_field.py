"""One setting: what is known of it when ``config`` declares it, and the check that every value given for it must pass.

``config`` makes its fields by ``setting`` and checks by ``checked``; ``flags`` reads the same metadata for its help.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ddptrain.config_file import nearest
from ddptrain.errors import UsageError


def setting(
    default: Any,
    text: str,
    *,
    identity: bool = False,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    env: str = "",
) -> Any:
    """A field with what the flag parser and the checks need to know of it, in its metadata.

    Args:
        text: what its flag's help says.
        identity: it decides the weights, so that a training resumes only where it is the same.
        choices: the values there are; any, where empty.
        low, high: bounds of a number, both included.
        env: a variable beside DDPTRAIN_<NAME> that sets it, weaker than everything but the default.
    """
    metadata = {"help": text, "identity": identity, "choices": choices, "low": low, "high": high, "env": env}
    return dataclasses.field(default=default, metadata=metadata)


def checked(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    """The value, as text or parsed, as the type of the field's default.

    Args:
        origin: variable, flag or file that the value came from.
    Raises:
        UsageError: of another type, none of the choices or out of bounds; it names ``origin``.
    """
    kind: type[Any] = type(field.default)
    try:
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(value)  # `epochs: yes` in a file; int() would make 1 of it
        parsed = _boolean(value) if kind is bool else kind(value)
    except (ValueError, OverflowError):
        raise UsageError(f"{origin}={value!r} is not of type {kind.__name__}", next_step=f"correct {origin}") from None
    choices, low, high = (field.metadata[k] for k in ("choices", "low", "high"))
    if choices and parsed not in choices:
        raise UsageError(
            f"{origin}={value!r} is not one of {', '.join(choices)}",
            hint=nearest(str(value), list(choices)),
            next_step=f"correct {origin}",
        )
    if kind in (int, float) and not low <= parsed <= high:
        raise UsageError(f"{origin}={value} is not between {low:g} and {high:g}", next_step=f"correct {origin}")
    return parsed


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError(value)
    return words[str(value).lower()]
