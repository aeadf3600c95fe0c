"""Standard streams that cannot end a training: what cannot be printed is lost, what was learned is not.

A pipe whose reader has gone (``| head``), a full disk behind a log, a stream that was closed from the start, an
encoding without a character that we use: none of them is a reason to lose hours of work, which metrics and checkpoints
tell of as well. ``cli`` calls ``forgive`` before it trains or launches; verbs that only print still fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


def printable(*streams: TextIO | None) -> None:
    """From now on characters that the encoding lacks are written as escapes, instead of raising."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def forgive() -> None:
    """Replace stdout and stderr by streams whose writes never fail.

    Closed ones lead to nowhere: the next file that is opened, such as a checkpoint, would otherwise get their number,
    and what is printed would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def _forgiving(old: TextIO | None, descriptor: int) -> TextIO:
    if old is not None:
        with contextlib.suppress(OSError):
            old.flush()
    encoding = (old.encoding if old else None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


class _Forgiving(io.FileIO):
    """A file that takes whatever it is given."""

    def write(self, content: Any, /) -> int:
        """The number of bytes taken, which is all of them where the file refuses."""
        size = memoryview(content).nbytes
        with contextlib.suppress(OSError):
            written = super().write(content)
            return size if written is None else int(written)
        return size
