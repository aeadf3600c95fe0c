"""The settings of launcher and ranks that do not depend on what is trained. A trainer adds its own in a subclass."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ddprun.errors import UsageError, nearest

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def setting(
    default: Any,
    text: str,
    *,
    name: str = "",
    identity: bool = False,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    env: str = "",
) -> Any:
    """Return a field of settings with the metadata that the flag parser and the checks need.

    Args:
        text: the help of its flag.
        name: name in flags, variables, files and manifests, if it is not the field's.
        identity: it affects the weights, so a training resumes only if it is unchanged.
        choices: the valid values; any value is valid if empty.
        low, high: bounds of a number, both included.
        env: another variable that sets it, stronger only than the default.
    """
    metadata = {
        "help": text, "name": name, "identity": identity, "choices": choices, "low": low, "high": high, "env": env,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


seconds = functools.partial(setting, low=0, high=86_400)


@dataclass(frozen=True)
class Settings:
    """What the launcher and the watchdogs read."""

    checkpoint_dir: str = setting(
        "", "directory of checkpoints and metrics; without it no checkpoint is saved", env="DDPJOB_CHECKPOINT_DIR"
    )
    hang_timeout: float = seconds(120.0, "seconds without progress after which a node's ranks are ended; 0 = never")
    stall_report: float = seconds(300.0, "seconds without a step after which a stall is only reported; 0 = never")
    volume_timeout: float = seconds(290.0, "hang timeout while a checkpoint is read or written, if it is longer")
    stop_grace: float = seconds(
        25.0, "seconds from SIGTERM to SIGKILL; less than the pod's", low=0.1, env="DDPJOB_STOP_GRACE"
    )
    on_divergence: str = setting(
        "report", "if the ranks have different parameters: only report it, or restart from a save from before",
        choices=("report", "restart"), env="DDPJOB_ON_DIVERGENCE",
    )  # fmt: skip
    chaos: str = setting("", "debugging aid: crash|exit|kill|hang|stop|slow|oom|diskfull:RANK:STEP[:PHASE]")


def fields_of(settings: type[Settings]) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of the class by the names that flags, variables and files use."""
    return {field.metadata["name"] or field.name: field for field in dataclasses.fields(settings)}


def given_settings(
    fields: Mapping[str, dataclasses.Field[Any]],
    prefix: str,
    env: Mapping[str, str],
    flags: Mapping[str, Any],
    *,
    further: Collection[str] = (),
) -> dict[str, Any]:
    """Return the settings that variables and flags give: variables of the fields, those with the prefix, flags.

    A later one wins. Other variables without the prefix are ignored.

    Args:
        flags: setting to value; None means not given.
        further: names that may follow the prefix, too.
    Raises:
        UsageError: an unknown variable with the prefix, or an invalid value; the error names its origin.
    """
    known = {prefix + name.upper(): name for name in fields}
    others = {prefix + name.upper() for name in further}
    if unknown := sorted(key for key in env if key.startswith(prefix) and key not in known and key not in others):
        raise UsageError(
            f"unknown environment variable {unknown[0]}",
            hint=nearest(unknown[0], known),
            next_step=f"correct or unset {unknown[0]}; --help lists the settings",
        )
    origins = {field.metadata["env"]: name for name, field in fields.items() if field.metadata["env"]} | known
    values = {name: checked(fields[name], env[key], key) for key, name in origins.items() if env.get(key)}
    named = {name: ("--" + name.replace("_", "-"), flags.get(name)) for name in fields}
    return values | {n: checked(fields[n], value, flag) for n, (flag, value) in named.items() if value is not None}


def checked(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    """Return the value, which may be text, in the type of the field's default.

    Args:
        origin: variable, flag or file that gave the value.
    Raises:
        UsageError: wrong type, not one of the choices, or out of bounds; it names ``origin``.
    """
    kind: type[Any] = type(field.default)
    try:
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(value)  # `epochs: yes` in a file: int() would return 1
        parsed = _BOOLEANS[str(value).lower()] if kind is bool else kind(value)
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"{origin}={value!r} is not of type {kind.__name__}", next_step=f"correct {origin}") from None
    choices, low, high = (field.metadata[k] for k in ("choices", "low", "high"))
    if choices and parsed not in choices:
        raise UsageError(
            f"{origin}={value!r} is not one of {', '.join(choices)}",
            hint=nearest(str(value), choices),
            next_step=f"correct {origin}",
        )
    if kind in (int, float) and not low <= parsed <= high:
        raise UsageError(f"{origin}={value} is not between {low:g} and {high:g}", next_step=f"correct {origin}")
    return parsed
