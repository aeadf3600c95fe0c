"""What a rank does at this moment, in memory that a launcher can read when the rank itself can no longer speak.

``worker``, ``group`` and ``train`` mark each phase, step and collective; ``watchdog`` (in the launcher) reads. A rank
that was stopped, or that waits inside C++ for a peer, cannot report itself: its last breadcrumb does.

What a launcher can still read of a rank that hangs: its breadcrumbs, its Python stacks, its flight recorder.

Three anonymous files in memory, made before the rank is started and inherited by it: they need no writable volume, and
nobody has to clear them away. SIGUSR1 asks for the dumps. The stacks come from faulthandler's C signal handler, which
works even where the interpreter is blocked inside a collective; the flight recorder from the guard's thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import pickle
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqqd24s40s")  # changes, step, collectives begun, CLOCK_MONOTONIC seconds, phase, collective
SIZE = _LAYOUT.size
# Before these phases end nothing has been learned that could be saved.
BEFORE_TRAINING = ("start", "rendezvous", "preflight", "infer", "data", "setup", "resume")


@dataclass(frozen=True)
class HeartbeatRecord:
    """One rank's last sign of life. ``collective`` is what it waits in, or empty while it works by itself."""

    changes: int = 0
    step: int = 0
    collectives: int = 0
    time: float = 0.0
    phase: str = "start"
    collective: str = ""

    @property
    def doing(self) -> str:
        """In words: ``in all_reduce``, ``in phase save``."""
        return f"in {self.collective}" if self.collective else f"in phase {self.phase}"


def read(memory: bytes | memoryview) -> HeartbeatRecord:
    """The crumb in ``memory``. It is written in one go but not atomically; a rank that hangs is not writing."""
    changes, step, collectives, at, phase, collective = _LAYOUT.unpack_from(memory)
    text = [part.rstrip(b"\0").decode(errors="replace") for part in (phase, collective)]
    return HeartbeatRecord(changes, step, collectives, at, text[0] or "start", text[1])


class StallTimer:
    """How long one rank's breadcrumbs have stood still, by the clock of who looks.

    Where the onlooker itself was stopped (a paused container), the time it slept counts against nobody.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self._most, self._looked, self._changes = 2 * interval, time.monotonic(), -1
        self.seconds = 0.0

    def look(self, changes: int) -> float:
        """Seconds without a change until now, ``changes`` being the newest crumb's."""
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, self._most), now
        self.seconds = 0.0 if changes != self._changes else self.seconds + elapsed
        self._changes = changes
        return self.seconds


class Heartbeat:
    """One rank's writer.

    Args:
        memory: SIZE bytes shared with the launcher; its own where there is none.
        on_mark: called with (phase or collective, step) as each begins; ``chaos`` strikes there.
    """

    def __init__(self, memory: memoryview | None = None, on_mark: Callable[[str, int], None] | None = None) -> None:
        self._memory = memory if memory is not None else memoryview(bytearray(SIZE))
        self.on_mark = on_mark
        self._changes = self._collectives = self._step = 0
        self._phase, self._collective = "start", ""
        self.touch()

    @property
    def last(self) -> HeartbeatRecord:
        """The newest crumb, safe to read from another thread."""
        return read(self._memory)

    def mark(self, phase: str, step: int | None = None) -> None:
        """The rank begins ``phase``, of step ``step`` (counting from 1) where it has one."""
        self._phase, self._step = phase, self._step if step is None else step
        self.touch()
        if self.on_mark:
            self.on_mark(phase, self._step)

    def touch(self) -> None:
        """Still alive: for loops that poll, and would notice themselves when they waited too long."""
        self._changes += 1
        _LAYOUT.pack_into(
            self._memory, 0, self._changes, self._step, self._collectives, time.monotonic(),
            self._phase.encode()[:24], self._collective.encode()[:40],
        )  # fmt: skip

    @contextlib.contextmanager
    def waiting_in(self, collective: str, *, counted: bool = True) -> Iterator[None]:
        """Inside, the rank waits for its peers.

        Args:
            counted: False for what not every rank does, such as reading the store: the count tells who is behind.
        """
        self._collectives += counted
        self._collective = collective
        self.touch()
        try:
            if self.on_mark:
                self.on_mark(collective, self._step)
            yield
        finally:
            self._collective = ""
            self.touch()


DUMP_SIGNAL = signal.SIGUSR1
_MOST = 8 * 2**20  # bytes of a dump that are worth keeping
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class Diagnostics:
    """File descriptors, the same in the launcher and in the rank."""

    heartbeat: int
    stacks: int
    flight: int

    @classmethod
    def create(cls, rank: int) -> Diagnostics:
        names = ("heartbeat", "stacks", "flight")
        diagnostics = cls(*(os.memfd_create(f"ddptrain-{name}-{rank}", 0) for name in names))
        os.ftruncate(diagnostics.heartbeat, SIZE)
        return diagnostics

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.heartbeat, self.stacks, self.flight

    def memory(self) -> memoryview:
        """The heartbeat, shared with whoever else maps them."""
        return memoryview(mmap.mmap(self.heartbeat, SIZE))

    def crumb(self) -> HeartbeatRecord:
        return read(os.pread(self.heartbeat, SIZE, 0))

    def texts(self) -> tuple[str, str]:
        """(stacks, flight recorder as JSON), empty where the rank could not dump them."""
        stacks, flight = (os.pread(fd, _MOST, 0).decode(errors="replace") for fd in (self.stacks, self.flight))
        return stacks, flight

    def forget(self) -> None:
        """Drop earlier dumps: what is asked for anew must not be taken for answered. The position is shared, too."""
        for descriptor in (self.stacks, self.flight):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)

    def close(self) -> None:
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def register_stack_dump(diagnostics: Diagnostics) -> None:
    """Make DUMP_SIGNAL write all stacks to ``diagnostics`` and wake the watchdog; call it in the main thread."""
    signal.signal(DUMP_SIGNAL, lambda *_: None)  # so that Python's own handler writes the signal to the wakeup pipe
    faulthandler.register(DUMP_SIGNAL, file=diagnostics.stacks, all_threads=True, chain=True)


def dump_flight_recorder(descriptor: int) -> None:
    """The last collectives of this rank as JSON, where the build of PyTorch has a recorder. Never raises."""
    with contextlib.suppress(Exception):  # a private function: whatever it does in another version, we go on dying
        from torch._C import _distributed_c10d

        recorded = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]  # noqa: S301 - our own bytes
        os.pwrite(descriptor, json.dumps(recorded, default=str).encode()[:_MOST], 0)


def training_frame(stacks: str) -> str | None:
    """Return ``file.py:line`` of the training thread's innermost frame of this package in a faulthandler dump."""
    package = Path(__file__).parent
    for thread in stacks.split("\n\n"):
        frames = [(Path(m["file"]), m["line"]) for m in _FRAME.finditer(thread)]
        ours = [(path.name, line) for path, line in frames if package in path.parents]
        if any(name == "worker.py" for name, _ in ours):  # only the training thread runs worker.py
            # Frames of the heartbeat and of fault injection wrap the work and say nothing about it.
            work = [pair for pair in ours if pair[0] not in ("heartbeat.py", "fault_injection.py")] or ours
            return f"{work[0][0]}:{work[0][1]}"
    return None
