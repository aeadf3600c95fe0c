"""The output of rank 0, and standard streams that end and delay no training.

A pipe whose reader has exited (``| head``) or does not read (``| less``), a terminal that is closed or stopped by
Ctrl-S, a full disk, a closed stream, an encoding without a character: none of them is a reason to lose hours of work,
which metrics and checkpoints record as well. ``cli`` calls ``never_fail_or_wait`` before it trains or launches, and
``finish_output`` at the end. Verbs that only print still fail.
"""

import contextlib
import io
import math
import os
import select
import signal
import stat
import sys
import time
from typing import Any, TextIO

_LINE_INTERVAL = 5.0  # seconds between lines about the progress
_KEPT = 2**20  # bytes of output that are kept for a reader that does not read
_PIPE_ATOMIC = 4096  # PIPE_BUF: a pipe that select calls writable takes as many bytes at once
_FINISHING = 10.0  # seconds at the end for a reader to take what is kept, unless a person is there


class Console:
    """Prints for rank 0 and is silent on the others."""

    def __init__(self, rank: int) -> None:
        self._quiet, self._shown = rank != 0, 0.0

    def log(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            print(text, flush=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Print a line about the progress every few seconds, and at the end."""
        now = time.monotonic()
        if now - self._shown >= _LINE_INTERVAL or done == total:
            self._shown = now
            self.log(f"step {done}/{total} · {text}")


def escape_unencodable(*streams: TextIO | None) -> None:
    """Make the streams write characters that their encoding lacks as escapes, instead of raising."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def never_fail_or_wait() -> None:
    """Replace stdout and stderr by streams whose writes never fail and never wait for a reader.

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
        by_line = number == 2 or os.isatty(number)
        setattr(sys, name, _text_stream(Output(number, _KEPT), old.encoding if old else None, by_line=by_line))


def continue_output() -> bool:
    """Write what is kept for stdout and stderr, as far as they take it now. Returns whether something is left."""
    left = [output.drain() for output in _outputs()]  # both, also if the first has something left
    return any(left)


def finish_output(*, stopped: bool) -> None:
    """Wait for the readers of stdout and stderr to take what is kept: 10 s at most, at a terminal until a signal comes.

    Args:
        stopped: a signal has already come, so wait for a second only.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not continue_output():
        return
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: signals.append(n))
    end = time.monotonic() + (1.0 if stopped else math.inf if os.isatty(2) else _FINISHING)
    while continue_output() and not signals and time.monotonic() < end:
        time.sleep(0.02)


def release_output() -> None:
    """In a fork whose standard streams are about to be replaced: forget what the parent keeps, and its descriptors."""
    for output in _outputs():
        output.release()


def _outputs() -> "list[Output]":
    raws = [getattr(getattr(stream, "buffer", None), "raw", None) for stream in (sys.stdout, sys.stderr)]
    return [raw for raw in raws if isinstance(raw, Output)]


def _text_stream(output: "Output", encoding: str | None, *, by_line: bool) -> TextIO:
    buffered = io.BufferedWriter(output)
    return io.TextIOWrapper(buffered, encoding or "utf-8", errors="backslashreplace", line_buffering=by_line)


class Output(io.RawIOBase):
    """A descriptor whose writes never fail, and never wait for the reader of a pipe or terminal.

    What the reader does not take at once is kept. Lines beyond that limit are dropped, and a line counts them.

    Args:
        kept: bytes to keep, about.
        why: that lines are dropped.
    """

    def __init__(self, descriptor: int, kept: int, why: str = "they were not read in time") -> None:
        self._descriptor, self._kept, self._why, self._owner = descriptor, kept, why, os.getpid()
        self._waits, self._opened = _has_reader(descriptor), _open_without_waiting(descriptor)
        self._pending = bytearray()
        self._dropped, self._dropping, self._line_begins = 0, False, True

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, content: Any, /) -> int:
        """Write or keep ``content``, or drop it. Returns its length."""
        data = bytes(content)
        if not self._waits or os.getpid() != self._owner:
            _write_all(self._descriptor, data)
            return len(data)
        for line in data.splitlines(keepends=True):
            if self._line_begins:
                self._dropping = self._dropped > 0 or len(self._pending) + len(line) > self._kept
            ends = line.endswith(b"\n")
            if self._dropping or len(self._pending) > 2 * self._kept:
                self._dropped += ends
            else:
                self._pending += line
            self._line_begins = ends
        self.drain()
        return len(data)

    @property
    def drops(self) -> bool:
        """Whether lines were dropped that no line has counted yet."""
        return self._dropped > 0

    def drain(self) -> bool:
        """Write what is kept as far as the reader takes it now. Returns whether something is left."""
        while self._pending or self._dropped:
            if not self._pending:
                self._pending += f"... {self._dropped} line(s) of output are missing here: {self._why}\n".encode()
                self._dropped = 0
            try:
                written = self._write_without_waiting()
            except OSError:  # there is no reader any more
                self._pending.clear()
                self._dropped = 0
                return False
            if not written:
                return True
            del self._pending[:written]
        return False

    def release(self) -> None:
        """Forget what is kept, and close the descriptor of its own."""
        self._pending.clear()
        self._waits = False
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def _write_without_waiting(self) -> int:
        if self._opened is not None:
            with contextlib.suppress(BlockingIOError):
                return os.write(self._opened, self._pending)
            return 0
        _, ready, _ = select.select([], [self._descriptor], [], 0)
        return os.write(self._descriptor, self._pending[:_PIPE_ATOMIC]) if ready else 0


def unbuffer_output() -> None:
    """Make stdout and stderr of a script's rank those of ``python -u``, as under torchrun."""
    errors = sys.stdin.errors if sys.stdin else "strict"
    for number, name, handler in ((1, "stdout", errors), (2, "stderr", "backslashreplace")):
        output = io.FileIO(number, "w", closefd=False)
        output.name = f"<{name}>"
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        stream = io.TextIOWrapper(output, encoding, handler, newline="\n", write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _write_all(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:  # a line is no reason to end a training
        pass


def _has_reader(descriptor: int) -> bool:
    """Return whether writes to the descriptor wait for another process: it is a pipe, a socket or a terminal."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _open_without_waiting(descriptor: int) -> int | None:
    """Open the same pipe or terminal again, without waiting in writes; None if that is not possible.

    O_NONBLOCK of the descriptor itself would hold for every process that has inherited it, such as the user's shell.
    """
    if not _has_reader(descriptor):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # a socket, or a terminal of another user
        return None
