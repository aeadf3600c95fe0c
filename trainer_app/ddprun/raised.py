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


def handled_by(leaving: SystemExit) -> Exception | None:
    """Return the exception whose handler called ``sys.exit``; None for a call outside of a handler."""
    error: BaseException | None = leaving
    while isinstance(error, SystemExit):
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    return error if isinstance(error, Exception) else None


def where(error: BaseException, *, within: BaseException | None = None) -> str | None:
    """Return ``file.py:line`` of the innermost frame of the program that raised, else of the innermost frame.

    Of a syntax error it is the place of the error, and of an error in a worker process the place there.

    Args:
        within: what was raised when ``error`` had been caught: it has the frames that lead to the handler.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    if found := of_worker(error):
        frames = [(file, int(line)) for file, line in _FRAME.findall(found[0])]
        return innermost_frame([frame for frame in frames if "-packages/" not in frame[0]] or frames)  # torch calls it
    raised, callers = (list(traceback.walk_tb(each.__traceback__ if each else None)) for each in (error, within))
    handler = next((n for n, (frame, _) in enumerate(callers) if raised and frame is raised[0][0]), len(callers))
    return innermost_frame((frame.f_code.co_filename, line) for frame, line in callers[:handler] + raised)
