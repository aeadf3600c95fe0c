"""The files of ``--log-dir`` for the output of a node's ranks in one life.

A volume whose server is gone blocks every process that uses it inside the kernel, and the launcher must go on
supervising; it may start no thread, either (``processes``). So another process opens and writes the files, and the
launcher waits for it only where nothing is to be supervised, for a limited time. Lines that the volume does not take
are dropped, and a line of the file counts them.
"""

import contextlib
import io
import json
import os
import select
import selectors
import signal
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddprun.errors import UsageError
from ddprun.files import close_all_but
from ddprun.launcher.processes import launcher_line
from ddprun.reporting.console import Output
from ddprun.signals import STOP_SIGNALS, die_with_parent

_OPENING = 2.0  # seconds for the volume to open the files
_FINISHING = 3.0  # seconds for the volume to take the last lines
_KEPT, _LEAST_KEPT = 2**24, 2**20  # bytes that are kept for a volume that is slow: of all ranks, and at least of one
_READ_SIZE = 65536
_FAILED, _WRITTEN = b"failed", b"written"  # what the process says: a write has failed; all is written
_MOST_REFUSED = 8  # that are named; usually all files are refused, or none

_open: "weakref.WeakSet[LogFiles]" = weakref.WeakSet()


class LogFiles:
    """Appends to the files, in a process of its own, what the launcher writes to ``streams``.

    Args:
        paths: of the files, one for each rank.
    Raises:
        OSError: no process or descriptor is left for it.

    Attributes:
        streams: one for each rank. A write never fails and never waits; it needs a flush.
        refused: why files cannot be opened. The streams of these take what is written, and drop it.
        answers: the volume has opened or refused the files. Otherwise it may do so later.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._folder, self._is_told = paths[0].parent, False
        self._writable: list[int] = []
        pipes: list[int] = []
        try:
            for _ in paths:
                readable, writable = os.pipe()
                pipes.append(readable)
                self._writable.append(writable)
            self._answer, answer = os.pipe()
        except OSError:
            _close(*pipes, *self._writable)
            raise
        parent = os.getpid()
        try:
            if os.fork() == 0:
                _run_writer(dict(zip(pipes, paths, strict=True)), answer, parent)
        except OSError:
            _close(*self._writable, self._answer)
            raise
        finally:
            _close(*pipes, answer)
        kept = max(_LEAST_KEPT, _KEPT // len(paths))
        why = "the volume did not take them in time"
        self._outputs = [Output(descriptor, kept, why) for descriptor in self._writable]
        self.streams = [io.BufferedWriter(output) for output in self._outputs]
        _open.add(self)
        self.refused: list[str] = []
        self._has_failed, self._has_written_all, self._has_ended = False, False, False  # the process
        self.answers = self._hear(_OPENING)

    @classmethod
    def of_life(cls, log_dir: str, ranks: Sequence[int], life: int) -> "LogFiles":
        """Open the files of the ranks in one life (the number of their starts); in the first, all must be writable.

        Raises:
            UsageError: one is refused. OSError: see above.
        """
        suffix = "" if life == 1 else f".life-{life}"
        logs = cls([Path(log_dir) / f"rank-{rank}{suffix}.log" for rank in ranks])
        for problem in logs.refused:
            if life == 1:
                raise UsageError(f"--log-dir: {problem}", next_step="name another directory")
            launcher_line(f"warning: --log-dir: {problem}")  # a volume that is full or away for a while
        if not logs.answers:
            logs._warn()
        return logs

    def check(self) -> None:
        """Say, once, that the volume does not take all output."""
        if not self._is_told and self.drops:
            self._warn()

    def _warn(self) -> None:
        if not self._is_told:
            self._is_told = True
            launcher_line(
                f"warning: --log-dir: {self._folder} takes no output, or not as fast as the ranks write it, or it is "
                "full; what it does not take is missing in the files of the ranks"
            )

    @property
    def drops(self) -> bool:
        """Whether lines are dropped at the moment, or were lost: on a full volume, or with the process."""
        while not self._has_failed and self._hear(0.0):
            pass
        return self._has_failed or any(output.drops for output in self._outputs)

    def drain(self) -> bool:
        """Pass on what is kept, as far as the volume takes it now. Returns whether something is left."""
        left = [output.drain() for output in self._outputs]  # all, also if the first has something left
        return any(left)

    def close(self) -> bool:
        """Wait for the volume to take what is left, for a limited time, and release the descriptors.

        Returns whether the volume has taken all that was left, and no write has failed; if not, that is said.
        """
        self.check()
        end = time.monotonic() + _FINISHING
        while self.drain() and time.monotonic() < end:
            time.sleep(0.01)
        is_left = self.drain()
        self.leave()
        while time.monotonic() < end and not self._has_ended:
            self._hear(0.05)
        _close(self._answer)
        has_all = self._has_written_all and not (self._has_failed or is_left)
        if not has_all:
            self._warn()
        return has_all

    def leave(self) -> None:
        """Close the pipes to the process, which ends when it has written what it has got."""
        for output in self._outputs:
            output.release()
        _close(*self._writable)
        self._writable = []
        _open.discard(self)

    def _hear(self, seconds: float) -> bool:
        if not select.select([self._answer], [], [], seconds)[0]:
            return False
        lines = os.read(self._answer, _READ_SIZE).splitlines()
        self._has_written_all |= _WRITTEN in lines
        self._has_ended = not lines
        self._has_failed |= _FAILED in lines or (self._has_ended and not self._has_written_all)  # or it was killed
        for line in lines:
            if line not in (_WRITTEN, _FAILED):
                with contextlib.suppress(ValueError):
                    self.refused = json.loads(line)
        return bool(lines)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _run_writer(files: Mapping[int, Path], answer: int, parent: int) -> NoReturn:
    """In the child: append to each file what comes through its pipe, until all pipes are closed.

    Args:
        files: by the descriptor of the pipe.
    """
    try:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:  # Ctrl-C reaches all processes of the launcher's group
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(parent)
        close_all_but({answer, *files})  # such as the port of rank 0, and the pipes' other ends
        refused, opened = [], {}
        for pipe, path in files.items():
            try:
                opened[pipe] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                refused.append(f"{path} cannot be written: {error.strerror}")
                os.close(pipe)
        with contextlib.suppress(OSError):
            os.write(answer, json.dumps(refused[:_MOST_REFUSED]).encode() + b"\n")
        _append(opened, answer)
        with contextlib.suppress(OSError):
            os.write(answer, _WRITTEN + b"\n")
    finally:
        os._exit(0)


def _append(files: dict[int, int], answer: int) -> None:
    has_failed = False
    with selectors.DefaultSelector() as selector:
        for pipe in files:
            selector.register(pipe, selectors.EVENT_READ)
        while files:
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_SIZE)
                try:
                    rest = data
                    while rest:
                        rest = rest[os.write(files[key.fd], rest) :]
                except OSError:  # a full volume: the line was printed, and the next may fit
                    if not has_failed:
                        has_failed = True
                        with contextlib.suppress(OSError):
                            os.write(answer, _FAILED + b"\n")
                if not data:
                    selector.unregister(key.fd)
                    with contextlib.suppress(OSError):
                        os.close(files.pop(key.fd))


def _leave_to_parent() -> None:
    for files in list(_open):
        files.leave()


os.register_at_fork(after_in_child=_leave_to_parent)
