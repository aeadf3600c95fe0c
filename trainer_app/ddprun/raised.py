"""What a raised exception says, and where in the program it was raised."""

import re
import traceback
from pathlib import Path

from ddprun.code_frames import innermost_frame

LONGEST_TEXT = 50_000  # characters of an error that are kept: some print all their data
_TRACEBACK = "Traceback (most recent call last):\n"
_FRAMES = re.compile(r"(?:[ \t][^\n]*\n|\n)+")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.M)


def message_of(error: BaseException) -> str:
    """Return what the error says, without the traceback that an error of a worker process has in its text."""
    found = of_worker(error)
    return found[1] if found else text_of(error)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, without the middle if it is huge; the text of an interpreter if that fails."""
    try:
        text = str(error)
    except Exception:
        return "<exception str() failed>"
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT // 2] + " ... " + text[-LONGEST_TEXT // 2 :]


def of_worker(error: BaseException) -> tuple[str, str] | None:
    """Return frames and message of an error that a process of a DataLoader or of ``mp.spawn`` passed on in its text."""
    _, traced, text = text_of(error).rpartition(_TRACEBACK)
    frames = _FRAMES.match(text) if traced else None
    message = text[frames.end() :].strip() if frames else ""
    return (frames[0], message) if frames and message else None


def where(error: BaseException) -> str | None:
    """Return ``file.py:line`` of the innermost frame of the program that raised, else of the innermost frame.

    Of a syntax error it is the place of the error, and of an error in a worker process the place there.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    if found := of_worker(error):
        frames = [(file, int(line)) for file, line in _FRAME.findall(found[0])]
        return innermost_frame([frame for frame in frames if "-packages/" not in frame[0]] or frames)  # torch calls it
    return innermost_frame((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
