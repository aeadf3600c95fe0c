"""Where settings come from: defaults, then DDPJOB_* variables, a YAML file, DDPTRAIN_* variables, and flags.

A later source wins. Every value is checked and named with its origin. PyYAML is imported only if there is a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun.errors import UsageError, nearest
from ddprun.settings import checked
from ddptrain.config import PREFIX, SETTINGS, Config

_FILE_VARIABLE = "DDPTRAIN_CONFIG"
# With --debug; a value that is given wins. A rank at a breakpoint has no heartbeat, and its peers wait for it.
_DEBUG_DEFAULTS = {
    "hang_timeout": 0.0, "stall_report": 0.0, "collective_timeout": 86_400.0, "rendezvous_timeout": 86_400.0,
}  # fmt: skip


def resolve(env: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Return the config from defaults, configuration file, environment and flags.

    Args:
        env: the process environment; unknown DDPTRAIN_* variables are refused, others ignored.
        flags: setting to value, and ``config`` to the path of a YAML file; None means not given.
    Raises:
        UsageError: unknown name or invalid value; the error names its origin.
    """
    given = {name: checked(SETTINGS[name], value, origin) for name, value, origin in given_settings(env, flags)}
    debugging = _DEBUG_DEFAULTS if given.get("debug") else {}
    config = Config().replaced({**debugging, **given})
    if config.sync == "bitwise" and config.accum > 1:
        raise UsageError(
            "--accum cannot be combined with --sync bitwise",
            hint="bitwise already computes every global batch in twelve small parts",
            next_step="remove --accum",
        )
    return config


def given_settings(env: Mapping[str, str], flags: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (name, value, origin) of each setting that is given, the stronger the later; raises as ``resolve``."""
    shared = {field.metadata["env"]: name for name, field in SETTINGS.items() if field.metadata["env"]}
    given: list[tuple[str, Any, str]] = [(name, env[key], key) for key, name in shared.items() if env.get(key)]
    if path := flags.get("config") or env.get(_FILE_VARIABLE):
        given += _settings_of(str(path))
    known = {PREFIX + name.upper(): name for name in SETTINGS}
    for key in sorted(k for k in env if k.startswith(PREFIX) and k != _FILE_VARIABLE):
        if key not in known:
            raise UsageError(
                f"unknown environment variable {key}",
                hint=nearest(key, known),
                next_step=f"correct or unset {key}; `ddptrain train --help` lists the settings",
            )
        given.append((known[key], env[key], key))
    return given + [(n, v, "--" + n.replace("_", "-")) for n, v in flags.items() if v is not None and n != "config"]


def _settings_of(path: str) -> list[tuple[str, Any, str]]:
    """Return (name, value, origin) of each setting in a YAML file; values other than booleans as text.

    The file maps names of settings, with dashes or underscores, to scalars.

    Raises:
        UsageError: the file cannot be read, is not a mapping, or has an unknown setting.
    """
    try:
        import yaml

        content = yaml.safe_load(Path(path).read_bytes())
    except ImportError:
        raise UsageError(
            f"cannot read {path}: PyYAML is not installed",
            next_step="pip install PyYAML, or use flags instead of the file",
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {reason}", next_step=f"correct {path}, or give another file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a mapping of settings to values", next_step="write lines such as `epochs: 3`")
    given = []
    for key, value in content.items():
        name, origin = str(key).replace("-", "_"), f"{path}: {key}"
        if name not in SETTINGS:
            raise UsageError(
                f"unknown setting {key} in {path}",
                hint=nearest(name, SETTINGS),
                next_step=f"correct {path}; `ddptrain config print` lists the settings",
            )
        if isinstance(value, (dict, list)) or value is None:
            raise UsageError(f"{origin} is not one value", next_step="write one number, word or true/false there")
        given.append((name, value if isinstance(value, bool) else str(value), origin))
    return given
