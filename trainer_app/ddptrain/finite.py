"""JSON that every reader accepts: NaN and infinities, which only Python's parser knows, become null.

Whatever the package writes or prints as JSON passes through ``dumps``; it stands below everything and imports nothing.
"""

from __future__ import annotations

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """The value with null for every float that is not finite, however deep in dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """As ``json.dumps``, of finite values."""
    return json.dumps(finite(value), indent=indent, sort_keys=sort_keys, allow_nan=False)
