"""Words of other programs on their way to a terminal: nothing in them may steer it.

A log line can hold escape sequences that retitle windows, rewrite what stands above, or paste into the shell; letters
that turn the direction of writing make one word look like another.
"""

import re

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


def printable(text: object) -> str:
    """The text without escape sequences, and with every other control character spelled out (``\\x07``)."""
    return _STEERING.sub(_spelled, _ESCAPE_SEQUENCE.sub("", str(text)))


def printable_line(text: object) -> str:
    """One line of a log as a terminal would have left it: a carriage return begins the line anew."""
    parts = [part for part in str(text).rstrip("\r\n").split("\r") if part]
    return printable(parts[-1]) if parts else ""


def one_line(text: object) -> str:
    """The same for a place that has room for one line: white space of any kind becomes one blank."""
    return printable(" ".join(str(text).split()))


def _spelled(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def ranks_text(number: int) -> str:
    """``4 ranks``, ``1 rank``."""
    return f"{number} rank{'' if number == 1 else 's'}"
