"""Words of other programs on their way to a terminal: nothing in them may steer it.

A log line can hold escape sequences that retitle windows, rewrite what stands above, or paste into the shell; letters
that turn the direction of writing make one word look like another.
"""

import difflib
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TextIO

from ddpjob.local.errors import LocalError

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, the clipboard
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]"  # the short ones
)
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def sanitize(text: object) -> str:
    """The text without escape sequences, and with every other control character spelled out (``\\x07``)."""
    return _STEERING.sub(_spelled, _ESCAPE_SEQUENCE.sub("", str(text)))


def sanitize_line(text: object) -> str:
    """One line of a log as a terminal would have left it: a carriage return begins the line anew."""
    parts = [part for part in str(text).rstrip("\r\n").split("\r") if part]
    return sanitize(parts[-1]) if parts else ""


def one_line(text: object) -> str:
    """The same for a place that has room for one line: white space of any kind becomes one blank."""
    return sanitize(" ".join(str(text).split()))


def _spelled(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def ranks_text(number: int) -> str:
    """``4 ranks``, ``1 rank``."""
    return f"{number} rank{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """``12s``, ``3m05s``, ``2h10m``, ``4d3h``."""
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86_400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def age(timestamp: str, now: datetime | None = None) -> str:
    """Time since a moment as Kubernetes writes it; empty where there is none, or none that can be read."""
    try:
        begin = datetime.fromisoformat(timestamp)
        return duration(((now or datetime.now(UTC)) - begin).total_seconds())
    except (ValueError, TypeError):
        return ""


USAGE = 2  # the exit code of a mistake, or of a spec that is refused


def error_lines(error: LocalError) -> list[str]:
    """The error as a user reads it; an empty hint or next step is left out."""
    parts = (("error: ", error.error), ("hint:  ", error.hint), ("next:  ", error.next_step))
    return [label + one_line(words) for label, words in parts if words]


def show_error(error: LocalError, stream: TextIO | None = None) -> None:
    """Print it, on standard error unless told otherwise."""
    print("\n".join(error_lines(error)), file=stream or sys.stderr, flush=True)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint at the nearest of the known names, else ``otherwise``."""
    choices = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.6)
    return f'did you mean "{choices[near[0]]}"?' if near else otherwise


def accuracy_text(accuracy: str | float) -> str:
    """From 0..1 to percent."""
    try:
        return f"{100 * float(accuracy):.2f} %"
    except ValueError:
        return str(accuracy)


def speed_text(samples_per_second: str) -> str:
    """``12,345 samples/s``."""
    number = f"{int(samples_per_second):,}" if samples_per_second.isdigit() else samples_per_second
    return f"{number} samples/s"
