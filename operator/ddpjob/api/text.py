"""Text of other programs, fit for a field of an API object and for a terminal."""

import re
from collections.abc import Collection

# Escape sequences in a log can set window titles, overwrite lines or paste into the shell; characters that change the
# direction of writing make one text look like another.
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: titles, links, the clipboard
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]"  # the short ones
)
_CONTROL_CHARACTER = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def clean(text: object) -> str:
    """Return the text without escape sequences, and with other control characters escaped (``\\x07``).

    It is valid Unicode: ``json.loads`` accepts lone surrogates. A sequence that is not closed ends with its line.
    """
    if (found := str(text)).isprintable():  # as nearly all texts of each plan
        return found
    return _CONTROL_CHARACTER.sub(_escaped, _ESCAPE_SEQUENCE.sub("", found.replace("\r\n", "\n")))


def clean_line(text: object) -> str:
    """Return one line of a log as a terminal shows it: text after a carriage return replaces the text before."""
    parts = [part for part in str(text).rstrip("\r\n").split("\r") if part]
    return clean(parts[-1]) if parts else ""


def clean_lines(text: object) -> str:
    """Return a part of a log, each line as a terminal shows it."""
    return "\n".join(map(clean_line, str(text).split("\n")))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def attributed(name: str, text: str, from_program: Collection[str] | None) -> str:
    """Return a hint or a next step for a person; ``from_program`` has the names of those that the program wrote."""
    return f"the program says: {text}" if name in (from_program or ()) else text


def shorten(text: str, limit: int) -> str:
    """Return ``text`` cut in the middle to at most ``limit`` characters; most of what is kept is its end.

    The beginning names the source and the end of a log usually holds the error.
    """
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]} … {text[-(limit - head - 3) :]}"
