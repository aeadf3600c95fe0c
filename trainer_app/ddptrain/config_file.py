"""Settings out of a YAML file, for ``config`` to check and to merge; PyYAML is imported only where there is a file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError


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
