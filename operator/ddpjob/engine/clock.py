"""Times as Kubernetes writes them. Nothing here reads a clock: ``now`` always comes in as an argument."""

from datetime import UTC, datetime


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as ``metav1.Time`` has it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> datetime:
    """The inverse of ``timestamp``; fractions of a second are accepted."""
    return datetime.fromisoformat(text)


def seconds_between(start: str, end: datetime) -> float:
    """Seconds from a timestamp to ``end``; never negative, whatever the clocks did."""
    return max((end - moment(start)).total_seconds(), 0.0)
