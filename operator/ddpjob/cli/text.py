"""Text for a person: strings without control characters, durations, counts, and the three lines of an error."""

import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.api.text import clean
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from ddpjob.api.time_spent import TimeSpent


def one_line(text: object) -> str:
    """Return the text on one line, without control characters: each run of white space becomes one space."""
    return clean(" ".join(str(text).split()))


def is_coloured() -> bool:
    """Return whether standard output takes colours; see https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def red(text: str) -> str:
    """Return the text as a terminal shows it in red: what is abnormal."""
    return f"\x1b[31m{text}\x1b[0m"


def number_of(number: int, noun: str) -> str:
    """Return for example ``4 ranks`` or ``1 rank``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_text(size: int) -> str:
    """Return for example ``512 B`` or ``1.5 GiB``."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"


def accuracy_text(accuracy: str | float) -> str:
    """Return an accuracy from 0 to 1 in percent."""
    try:
        return f"{100 * float(accuracy):.2f} %"
    except ValueError:
        return str(accuracy)


def speed_text(samples_per_second: str) -> str:
    """Return for example ``12,345 samples/s``."""
    number = f"{int(samples_per_second):,}" if samples_per_second.isdigit() else samples_per_second
    return f"{number} samples/s"


def duration(seconds: float) -> str:
    """Return for example ``12s``, ``3m05s``, ``2h10m`` or ``4d3h``."""
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86_400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def time_text(spent: "TimeSpent") -> str:
    """Return where the time of a job went, the longest first, and the goodput with its formula."""
    longest = sorted(spent.by_category.items(), key=lambda item: -item[1])
    text = ", ".join(f"{category} {duration(seconds)}" for category, seconds in longest if seconds)
    if spent.goodput is not None:
        text += f"; goodput {100 * spent.goodput:.0f} % = training / (all - queued - stopped)"
    return text


def age(timestamp: object) -> str:
    """Return the time since a Kubernetes timestamp; empty if it is absent or cannot be parsed."""
    try:
        return duration((datetime.now(UTC) - datetime.fromisoformat(str(timestamp))).total_seconds())
    except (ValueError, TypeError):
        return ""


def show_error(error: DDPJobError) -> None:
    """Print an error on standard error: what is wrong, why that may be, what to do. Empty parts are left out."""
    print("\n".join(label + one_line(text) for label, text in error.parts()), file=sys.stderr, flush=True)
