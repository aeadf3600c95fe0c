"""Durations as a person reads them at a glance."""

from datetime import UTC, datetime


def short(seconds: float) -> str:
    """``12s``, ``3m05s``, ``2h10m``, ``4d3h``."""
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86_400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def since(timestamp: str, now: datetime | None = None) -> str:
    """Time since a moment as Kubernetes writes it; empty where there is none, or none that can be read."""
    try:
        begin = datetime.fromisoformat(timestamp)
        return short(((now or datetime.now(UTC)) - begin).total_seconds())
    except (ValueError, TypeError):
        return ""
