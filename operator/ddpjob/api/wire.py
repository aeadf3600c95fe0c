"""Values as the Kubernetes API writes them: JSON objects, RFC 3339 times, text that fits into a field.

Nothing here reads a clock: the current time always comes in as an argument.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]
"""A JSON object."""


def element(items: Iterable[Json] | None, key: str, value: str) -> Json:
    """Return the element of a list in which ``key`` has this value, for example a container by name; {} if none."""
    return next((item for item in items or () if item.get(key) == value), {})


def condition(status: Mapping[str, Any] | None, kind: str) -> Json:
    """Return a condition of a status, {} if it is not set."""
    return element((status or {}).get("conditions"), "type", kind)


def is_true(status: Mapping[str, Any] | None, kind: str) -> bool:
    """Return whether a condition of a status is True."""
    return condition(status, kind).get("status") == "True"


def depth_exceeds(value: object, limit: int) -> bool:
    """Return whether a JSON value has more than ``limit`` levels of objects and lists; it does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        nested = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [child for children in nested for child in children]
    return bool(level)


def timestamp(time: datetime) -> str:
    """Return ``time`` as RFC 3339 in UTC with whole seconds, the format of ``metav1.Time``."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Return the time of a timestamp; RFC 3339 allows a small "t" and "z", which Python does not read."""
    return datetime.fromisoformat(text.upper())


def seconds_since(start: str, end: datetime) -> float:
    """Return the seconds from the timestamp ``start`` to ``end``; negative if ``start`` is later."""
    return (end - parse_time(start)).total_seconds()


def seconds_between(start: str, end: datetime) -> float:
    """Return the seconds from the timestamp ``start`` to ``end``, at least 0 even if the clock was set back."""
    return max(seconds_since(start, end), 0.0)


def clean(text: object) -> str:
    """Return ``text`` as valid Unicode: each lone surrogate, which ``json.loads`` accepts, becomes "?"."""
    return str(text).encode("utf-8", "replace").decode()


def shorten(text: str, limit: int) -> str:
    """Return ``text`` cut in the middle to at most ``limit`` characters; most of what is kept is its end.

    The beginning names the source and the end of a log usually holds the error.
    """
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} … {text[-(limit - head - 3) :]}"
