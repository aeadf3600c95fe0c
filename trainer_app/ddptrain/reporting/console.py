"""What a person sees of rank 0: lines, and on a terminal one updating bar.

``cli``, ``model_verbs`` and ``children`` make it; ``worker``, ``train`` and ``telling`` speak through it. Of a launched
rank, ``relay`` takes the lines on to the launcher's own output.

Standard streams that cannot end a training: what cannot be printed is lost, what was learned is not.

A pipe whose reader has gone (``| head``), a full disk behind a log, a stream that was closed from the start, an
encoding without a character that we use: none of them is a reason to lose hours of work, which metrics and checkpoints
tell of as well. ``cli`` calls ``ignore_write_errors`` before it trains or launches; verbs that only print still fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from ddptrain.files import dumps

_WIDTH = 24
_LINE_INTERVAL = 5.0  # seconds between progress lines where there is no terminal
_BAR_INTERVAL = 0.1


class Console:
    """Speaks for rank 0 and is silent for the others.

    Args:
        terminal: stream of a terminal for the bar, or None. A launched rank's own stdout is a pipe to the launcher.
        as_json: no bar: whoever reads objects, which ``streams`` or the launcher makes of lines, wants nothing else.
    """

    def __init__(self, rank: int, terminal: TextIO | None, *, as_json: bool = False) -> None:
        self._quiet, self._terminal = rank != 0, None if as_json else terminal
        self._shown = 0.0
        self._drawn = False

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            self._erase()
            self._print(text)

    def step(self, done: int, total: int, text: str) -> None:
        """Progress: redraws the bar, or says a line every few seconds."""
        now = time.monotonic()
        interval = _BAR_INTERVAL if self._terminal else _LINE_INTERVAL
        if self._quiet or (now - self._shown < interval and done != total):
            return
        self._shown = now
        if self._terminal is None:
            self._print(f"step {done}/{total} · {text}")
            return
        full = _WIDTH * done // max(1, total)
        self._terminal.write(f"\r\x1b[K{'█' * full}{'░' * (_WIDTH - full)} {done}/{total} · {text}")
        self._terminal.flush()
        self._drawn = True

    def _print(self, text: str) -> None:
        print(text, flush=True)

    def _erase(self) -> None:
        if self._drawn and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._drawn = False


def json_line(rank: int | None, text: str) -> str:
    """A line of output as JSON: when, which rank, what."""
    return dumps({"time": round(time.time(), 3), "rank": rank, "message": text})


def terminal_or_none(stream: TextIO = sys.stderr) -> TextIO | None:
    """The stream if a person watches it."""
    return stream if stream.isatty() else None


def escape_unencodable(*streams: TextIO | None) -> None:
    """From now on characters that the encoding lacks are written as escapes, instead of raising."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def ignore_write_errors() -> None:
    """Replace stdout and stderr by streams whose writes never fail.

    Closed ones lead to nowhere: the next file that is opened, such as a checkpoint, would otherwise get their number,
    and what is printed would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def log_as_json(rank: int | None, names: Sequence[str] = ("stdout", "stderr")) -> None:
    """From now on every line that this process prints is a JSON object, as ``console.json_line`` makes them.

    Args:
        rank: of this process; None for a launcher, whose stdout is made of objects already.
    """
    for name in names:
        setattr(sys, name, _Tagging(getattr(sys, name), rank))


class _Tagging(io.TextIOBase):
    """Passes whole lines on as objects; as they are in a forked rank, whose launcher tags them."""

    def __init__(self, stream: TextIO, rank: int | None) -> None:
        self._stream, self._rank, self._owner = stream, rank, os.getpid()
        self._begun = ""

    def write(self, text: str, /) -> int:
        """The number of characters taken, all of them."""
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
        """For who writes bytes, and knows what they are."""
        return self._stream.buffer


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
