"""What is known of one setting, the check that every value given for it must pass, and settings out of a YAML file.

``config`` declares its fields by ``setting``, reads a file by ``settings_of`` and checks by ``checked``; ``flags``
reads the fields' metadata for its help. PyYAML is imported only where there is a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def settings_of(path: str, names: Sequence[str]) -> list[tuple[str, Any, str]]:
    """The settings of a YAML file: a mapping of field names, with dashes or underscores, to scalars.

    Returns (name, value, origin) of each; values other than booleans as text, for ``config`` to parse.

    Raises:
        UsageError: the file cannot be read, is no mapping, or names a setting that does not exist.
    """
    try:
        import yaml

        content = yaml.safe_load(Path(path).read_bytes())
    except ImportError:
        raise UsageError(
            f"cannot read {path}: PyYAML is not installed", next_step="pip install PyYAML, or use flags"
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {reason}", next_step=f"correct {path}, or name another file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a mapping of settings to values", next_step="write lines such as `epochs: 3`")
    given = []
    for key, value in content.items():
        name, origin = str(key).replace("-", "_"), f"{path}: {key}"
        if name not in names:
            raise UsageError(
                f"unknown setting {key} in {path}",
                hint=nearest(name, names),
                next_step=f"correct {path}; `ddptrain config print` lists what there is",
            )
        if isinstance(value, (dict, list)) or value is None:
            raise UsageError(f"{origin} is not one value", next_step=f"correct {path}")
        given.append((name, value if isinstance(value, bool) else str(value), origin))
    return given


def nearest(key: str, known: Sequence[str]) -> str:
    """A hint at what a mistyped key may mean."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else ""


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in words:
        raise ValueError(value)
    return words[str(value).lower()]
