"""Times as the Kubernetes API writes them: RFC 3339. Nothing here reads a clock: the current time is an argument."""

from datetime import UTC, datetime


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


def since(known: str | None, now: datetime) -> str:
    """Return the recorded time at which something was first seen; ``now`` if none is, or if a clock was set back."""
    return known if known is not None and seconds_since(known, now) >= 0 else timestamp(now)


def remaining(wait: float, start: str, end: datetime) -> float:
    """Return how many of ``wait`` seconds from ``start`` on are left at ``end``; negative if they are over.

    0 if ``start`` is later than ``end``: a clock was set back, and it is unknown how long the wait has lasted.
    """
    since = seconds_since(start, end)
    return wait - since if since >= 0 else 0.0
