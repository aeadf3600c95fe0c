"""What a raised exception says, and where in the program it was raised."""

import builtins
import linecache
import re
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from ddprun.code_frames import innermost

LONGEST_TEXT = 50_000  # characters of an error that are kept: some print all their data
_LONGEST_CAUSE = 300
_DYING = 3.0  # seconds that a process may take to end after its connections have closed
_TRACEBACK = "Traceback (most recent call last):\n"
_FRAMES = re.compile(r"(?:[ \t][^\n]*\n|\n)+")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.M)
_CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of the above exception)[^\n]*:\n\n")
# How torch begins the text of an error of another process: torch._utils, torch.multiprocessing.spawn.
_BY_TORCH = re.compile(r"Caught \w+ [^\n]*\.\nOriginal |\s*-- Process \d+ terminated with the following error:\n")
# The cause of an error that a pool of processes passes on: multiprocessing, concurrent.futures, and copies of them.
_BY_POOL = ("RemoteTraceback", "_RemoteTraceback")


def message_of(error: BaseException) -> str:
    """Return what the error says; of an error of a worker process without the traceback and the type in its text.

    An error without a text is described by the line that raised it, and a syntax error has no place in its text.
    """
    found = _of_worker(error)
    text = found[1] if found else str(error.msg) if _is_of_file(error) else text_of(error)
    kind, _, rest = text.partition(": ")
    if found and kind.rpartition(".")[2] == type(error).__name__:
        text = rest
    if not text:
        frame = _place(error)
        line = linecache.getline(str(frame[0]), frame[1]).strip() if frame else ""
        text = f"no message, raised by `{line}`" if line else "no message"
    notes = getattr(error, "__notes__", None)  # Python 3.11
    return "\n".join([text, *map(str, notes)]) if isinstance(notes, list) else text


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, without the middle if it is huge; the text of an interpreter if that fails."""
    try:
        text = str(error)
    except Exception:
        return "<exception str() failed>"
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT // 2] + " ... " + text[-LONGEST_TEXT // 2 :]


def _of_worker(error: BaseException) -> tuple[list[tuple[str, int]], str] | None:
    """Return frames and text of an error that a worker process passed on, as that process saw it; None for others.

    Only what torch and pools of processes write counts: the text of another error may quote any traceback.
    """
    text = passed = text_of(error)
    if by_torch := _BY_TORCH.match(text):
        passed = text[by_torch.end() :]
    elif type(error.__cause__).__name__ in _BY_POOL:
        passed = str(error.__cause__)
    else:
        return None
    last = _CHAINED.split(passed)[-1].partition(_TRACEBACK)[2]
    lines = _FRAMES.match(last)
    frames = [(file, int(line)) for file, line in _FRAME.findall(lines[0])] if lines else []
    if not lines or not frames:  # of an exception group
        return None
    return frames, last[lines.end() :].strip() if by_torch else text


def first_of(error: BaseException) -> tuple[BaseException, str]:
    """Return the first exception of a group, and text about the others; the error itself if it is no group."""
    first, *others = _leaves(error)
    text = f"; and {len(others)} more in the {type(error).__name__} {getattr(error, 'message', '')[:100]!r}"
    return first, text if others else ""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, getattr(builtins, "BaseExceptionGroup", ())):  # Python 3.11
        for each in error.exceptions:  # type: ignore[attr-defined]
            yield from _leaves(each)
    else:
        yield error


def caused_by(error: BaseException) -> str:
    """Return the first error of those that ``raise … from`` names, as text; empty for none, and if it is quoted."""
    cause = error
    for _ in range(100):  # a chain may be a circle
        if cause.__cause__ is None or type(cause.__cause__).__name__ in _BY_POOL:
            break
        cause = cause.__cause__
    if cause is error or text_of(cause) in text_of(error):
        return ""
    place = where(cause, within=error)
    at = f" ({place})" if place and place != where(error) else ""
    said = message_of(cause).split("\n")[0][:_LONGEST_CAUSE].strip()
    return f"; caused by {type(cause).__name__}: {said}{at}"


def killed_worker(error: BaseException) -> tuple[int, int] | None:
    """Return pid and signal of a worker of the DataLoader that the error was raised in; None if no signal ended one.

    torch names the signal if its handler of SIGCHLD runs in time; else the error is, for example, of the connection.
    """
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    loaders = (each for each in frames if type(each).__name__ == "_MultiProcessingDataLoaderIter")
    workers = [worker for loader in loaders for worker in getattr(loader, "_workers", ())]
    is_broken = isinstance(error, (OSError, EOFError)) and not _of_worker(error)
    end = time.monotonic() + (_DYING if workers and is_broken else 0)
    while True:
        for worker in workers:
            if (code := worker.exitcode or 0) < 0 and code != -signal.SIGTERM:  # by which torch ends the others
                return worker.pid, -code
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)


def earlier(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that the error was raised from, or in whose handlers, as Python shows them; the last first."""
    for _ in range(100):  # a chain may be a circle
        before = error.__cause__ if error.__suppress_context__ else error.__context__
        if before is None:
            return
        yield (error := before)


def handled_by(leaving: SystemExit) -> Exception | None:
    """Return the exception whose handler called ``sys.exit``; None for a call outside of a handler."""
    handled = next((error for error in earlier(leaving) if not isinstance(error, SystemExit)), None)
    return handled if isinstance(handled, Exception) else None


def where(error: BaseException, *, within: BaseException | None = None) -> str | None:
    """Return ``file.py:line`` of the innermost frame of the program that raised, else of the innermost frame.

    Of a syntax error it is the place of the error, and of an error in a worker process the place there.

    Args:
        within: what was raised when ``error`` had been caught: it has the frames that lead to the handler.
    """
    frame = _place(error, within)
    return f"{frame[0].name}:{frame[1]}" if frame else None


def _is_of_file(error: BaseException) -> TypeGuard[SyntaxError]:
    """Return whether it is a syntax error, which has a file and a line of its own."""
    return isinstance(error, SyntaxError) and bool(error.filename) and not str(error.filename).startswith("<")


def _place(error: BaseException, within: BaseException | None = None) -> tuple[Path, int] | None:
    if _is_of_file(error) and error.filename:
        return Path(error.filename), error.lineno or 0
    raised, callers = (list(traceback.walk_tb(each.__traceback__ if each else None)) for each in (error, within))
    handler = next((n for n, (frame, _) in enumerate(callers) if raised and frame is raised[0][0]), len(callers))
    frames = [(frame.f_code.co_filename, line) for frame, line in callers[:handler] + raised]
    found = _of_worker(error)
    return innermost(frames + (found[0] if found else []))
