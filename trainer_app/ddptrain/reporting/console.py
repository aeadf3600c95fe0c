"""The output of rank 0: lines, on a terminal a progress bar, and standard streams whose errors end no training.

A pipe whose reader has exited (``| head``), a full disk, a closed stream, an encoding without a character: none of them
is a reason to lose hours of work, which metrics and checkpoints record as well. ``cli`` calls ``ignore_write_errors``
before it trains or launches. Verbs that only print still fail.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from ddptrain.files import dumps_json

_WIDTH = 24
_LINE_INTERVAL = 5.0  # seconds between progress lines where there is no terminal
_BAR_INTERVAL = 0.1


class Console:
    """Prints for rank 0 and is silent on the others.

    Args:
        terminal: the stream of a terminal for the bar, or None. A launched rank's stdout is a pipe to the launcher.
    """

    def __init__(self, rank: int, terminal: TextIO | None) -> None:
        self._quiet, self._terminal = rank != 0, terminal
        self._shown = 0.0
        self._drawn = False

    def log(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            if self._drawn and self._terminal is not None:
                self._terminal.write("\r\x1b[K")
                self._terminal.flush()
                self._drawn = False
            print(text, flush=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Show progress: redraw the bar, or without a terminal print a line every few seconds."""
        now = time.monotonic()
        interval = _BAR_INTERVAL if self._terminal else _LINE_INTERVAL
        if self._quiet or (now - self._shown < interval and done != total):
            return
        self._shown = now
        if self._terminal is None:
            print(f"step {done}/{total} · {text}", flush=True)
            return
        full = _WIDTH * done // max(1, total)
        self._terminal.write(f"\r\x1b[K{'█' * full}{'░' * (_WIDTH - full)} {done}/{total} · {text}")
        self._terminal.flush()
        self._drawn = True


def json_line(rank: int | None, text: str) -> str:
    """Return a line of output as a JSON object with time, rank and message."""
    return dumps_json({"time": round(time.time(), 3), "rank": rank, "message": text})


def terminal_or_none() -> TextIO | None:
    """Return stderr if it is a terminal; never after ``log_as_json``."""
    return sys.stderr if sys.stderr.isatty() else None


def escape_unencodable(*streams: TextIO | None) -> None:
    """Make the streams write characters that their encoding lacks as escapes, instead of raising."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def ignore_write_errors() -> None:
    """Replace stdout and stderr by streams whose writes never fail.

    Closed descriptors are opened on /dev/null: otherwise the next file, such as a checkpoint, would get their number,
    and printed lines would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        old: TextIO | None = getattr(sys, name)
        if old is not None:
            with contextlib.suppress(OSError):
                old.flush()
        file = io.BufferedWriter(_IgnoringErrors(number, "w", closefd=False))
        encoding, by_line = (old and old.encoding) or "utf-8", number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(file, encoding=encoding, errors="backslashreplace", line_buffering=by_line)
        setattr(sys, name, stream)


def log_as_json(rank: int | None, names: Sequence[str] = ("stdout", "stderr")) -> None:
    """Make this process print every line as a JSON object, see ``json_line``.

    Args:
        rank: of this process; None for a launcher.
        names: the streams to change. A launcher's stdout already consists of objects.
    """
    for name in names:
        setattr(sys, name, _JsonLines(getattr(sys, name), rank))


class _JsonLines(io.TextIOBase):
    """Writes whole lines as JSON objects; in a forked rank unchanged, because the launcher encodes them."""

    def __init__(self, stream: TextIO, rank: int | None) -> None:
        self._stream, self._rank, self._owner = stream, rank, os.getpid()
        self._begun = ""

    def write(self, text: str, /) -> int:
        """Write ``text`` and return its length."""
        if os.getpid() != self._owner:
            return self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._stream.writelines(json_line(self._rank, line) + "\n" for line in lines)
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def buffer(self) -> Any:
        """The stream for bytes, which are written unchanged."""
        return self._stream.buffer


class _IgnoringErrors(io.FileIO):
    """A file whose writes never fail."""

    def write(self, content: Any, /) -> int:
        """Write ``content`` and return the number of bytes written; all of them if the file refuses."""
        size = memoryview(content).nbytes
        with contextlib.suppress(OSError):
            written = super().write(content)
            return size if written is None else int(written)
        return size
