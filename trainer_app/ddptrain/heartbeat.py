"""A rank's heartbeat and its dumps, in anonymous memory files that its launcher can read at any time.

A rank that is stopped, or that waits inside C++ for a peer, cannot report. Its last heartbeat shows what it was doing.
DUMP_SIGNAL makes it dump its Python stacks and PyTorch's flight recorder. The files need no volume and no cleanup.
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

# Changes, step, collectives begun, CLOCK_MONOTONIC seconds, limit in seconds, phase, collective.
_LAYOUT = struct.Struct("<qqqdd24s40s")
SIZE = _LAYOUT.size
_NOTHING = contextlib.nullcontext()
# In these phases there is no progress that a stop could save.
BEFORE_TRAINING = ("start", "rendezvous", "preflight", "infer", "data", "setup", "resume")


def activity(phase: str, collective: str) -> str:
    """Return what a rank is doing as text: ``in all_reduce``, ``in phase save``."""
    return f"in {collective}" if collective else f"in phase {phase}"


@dataclass(frozen=True)
class HeartbeatRecord:
    """The newest heartbeat of one rank.

    Attributes:
        limit: seconds without a change that this phase may take; 0 for the limit of the observer.
        collective: what the rank waits in; empty while it works by itself.
    """

    changes: int = 0
    step: int = 0
    collectives: int = 0
    time: float = 0.0
    limit: float = 0.0
    phase: str = "start"
    collective: str = ""

    @classmethod
    def unpack(cls, memory: bytes | memoryview) -> HeartbeatRecord:
        """Read the record from ``memory``. The write is not atomic, but a rank that hangs does not write."""
        changes, step, collectives, at, limit, phase, collective = _LAYOUT.unpack_from(memory)
        text = [part.rstrip(b"\0").decode(errors="replace") for part in (phase, collective)]
        return cls(changes, step, collectives, at, limit, text[0] or "start", text[1])

    @property
    def activity(self) -> str:
        """See ``activity`` above."""
        return activity(self.phase, self.collective)


class StallTimer:
    """Measures how long a heartbeat has not changed, by the observer's clock.

    If the observer itself was stopped (a paused container), at most two intervals of that time are counted.

    Args:
        interval: seconds between two observations.
    """

    def __init__(self, interval: float) -> None:
        self._longest, self._observed, self._changes = 2 * interval, time.monotonic(), -1
        self.seconds = 0.0

    def observe(self, changes: int) -> float:
        """Return the seconds without a change until now, given the newest heartbeat's ``changes``."""
        now = time.monotonic()
        elapsed, self._observed = min(now - self._observed, self._longest), now
        self.seconds = 0.0 if changes != self._changes else self.seconds + elapsed
        self._changes = changes
        return self.seconds


class PhaseListener(Protocol):
    """What a trace of the rank needs to know; see ``training.profiling``."""

    def phase(self, name: str) -> None:
        """Take note that the rank begins a phase, which ends the one before."""

    def collective(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that the rank keeps while it waits in a collective."""

    def failed(self) -> None:
        """Take note that the rank has reported an error and is about to exit."""


class Heartbeat:
    """Writes one rank's heartbeat.

    Args:
        memory: SIZE bytes shared with the launcher; private memory if None.
        on_mark: called with (phase or collective, step) as each begins; fault injection hooks in here.

    Attributes:
        listener: told about phases and collectives, for a trace; normally None.
    """

    def __init__(self, memory: memoryview | None = None, on_mark: Callable[[str, int], None] | None = None) -> None:
        self._memory = memory if memory is not None else memoryview(bytearray(SIZE))
        self._on_mark = on_mark
        self.listener: PhaseListener | None = None
        self._changes = self._collectives = self._step = 0
        self._phase, self._collective, self._limit = "start", "", 0.0
        self.touch()

    @property
    def last(self) -> HeartbeatRecord:
        """The newest record; safe to read from another thread."""
        return HeartbeatRecord.unpack(self._memory)

    def mark(self, phase: str, step: int | None = None, *, limit: float = 0.0) -> None:
        """Record that the rank begins ``phase``, and ``step`` (counting from 1) if the phase has one.

        Args:
            limit: seconds without a heartbeat that make a hang in this phase, if they are more than elsewhere.
        """
        self._phase, self._limit, self._step = phase, limit, self._step if step is None else step
        self.touch()
        if self.listener:
            self.listener.phase(phase)
        if self._on_mark:
            self._on_mark(phase, self._step)

    def touch(self) -> None:
        """Record a sign of life without a new phase: for loops that poll and have a timeout of their own."""
        self._changes += 1
        _LAYOUT.pack_into(
            self._memory, 0, self._changes, self._step, self._collectives, time.monotonic(), self._limit,
            self._phase.encode()[:24], self._collective.encode()[:40],
        )  # fmt: skip

    @contextlib.contextmanager
    def waiting_in(self, collective: str, *, counted: bool = True) -> Iterator[None]:
        """Record that the rank waits for its peers in ``collective`` until the context ends.

        Args:
            counted: False for waits that not every rank does, such as for the store. The count shows who is behind.
        """
        self._collectives += counted
        self._collective = collective
        self.touch()
        try:
            if self._on_mark:
                self._on_mark(collective, self._step)
            with self.listener.collective(collective) if self.listener else _NOTHING:
                yield
        finally:
            self._collective = ""
            self.touch()


DUMP_SIGNAL = signal.SIGUSR1
_DUMP_LIMIT = 8 * 2**20  # bytes of one dump that are kept
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class Diagnostics:
    """Descriptors of one rank's memory files, the same numbers in the launcher and in the rank.

    Attributes:
        flight, trace: the flight recorder as JSON, and as PyTorch wrote it.
    """

    heartbeat: int
    stacks: int
    flight: int
    trace: int

    @classmethod
    def create(cls, rank: int) -> Diagnostics:
        """Create the files of ``rank``."""
        names = ("heartbeat", "stacks", "flight", "trace")
        diagnostics = cls(*(os.memfd_create(f"ddptrain-{name}-{rank}", 0) for name in names))
        os.ftruncate(diagnostics.heartbeat, SIZE)
        return diagnostics

    def memory(self) -> memoryview:
        """Map the heartbeat's memory, shared with every process that maps it."""
        return memoryview(mmap.mmap(self.heartbeat, SIZE))

    def last_heartbeat(self) -> HeartbeatRecord:
        return HeartbeatRecord.unpack(os.pread(self.heartbeat, SIZE, 0))

    def dumps(self) -> tuple[str, str]:
        """Return (stacks, flight recorder as JSON); a dump that the rank could not write is empty."""
        stacks, flight = (os.pread(fd, _DUMP_LIMIT, 0).decode(errors="replace") for fd in (self.stacks, self.flight))
        return stacks, flight

    def raw_trace(self) -> bytes:
        """Return the flight recorder's pickle, for ``torchfrtrace``; the launcher does not unpickle it."""
        return os.pread(self.trace, _DUMP_LIMIT, 0)

    def clear_dumps(self) -> None:
        """Delete earlier dumps, so that they are not taken for new ones. The rank shares the file position."""
        for descriptor in (self.stacks, self.flight, self.trace):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)

    def close(self) -> None:
        for descriptor in astuple(self):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def register_stack_dump(diagnostics: Diagnostics) -> None:
    """Make DUMP_SIGNAL dump all stacks to ``diagnostics``, then wake the watchdog. Call it in the main thread.

    faulthandler's handler is written in C and works while the interpreter is blocked inside a collective.
    """
    signal.signal(DUMP_SIGNAL, lambda *_: None)  # so that Python's own handler writes the signal to the wakeup pipe
    faulthandler.register(DUMP_SIGNAL, file=diagnostics.stacks, all_threads=True, chain=True)


def dump_flight_recorder(diagnostics: Diagnostics) -> None:
    """Write this rank's last collectives, if the build of PyTorch records them. Never raises and never waits.

    A thread of its own does it: the recorder takes locks that a blocked communicator may hold.
    """
    threading.Thread(target=_dump_flight_recorder, args=(diagnostics,), name="flight-recorder", daemon=True).start()


def _dump_flight_recorder(diagnostics: Diagnostics) -> None:
    with contextlib.suppress(Exception):  # private functions that another version may change
        raw, recorded = newest_trace()
        os.pwrite(diagnostics.trace, raw[:_DUMP_LIMIT], 0)
        os.pwrite(diagnostics.flight, json.dumps(recorded, default=str).encode()[:_DUMP_LIMIT], 0)


def newest_trace() -> tuple[bytes, dict[str, Any]]:
    """Return the flight recorder's pickle and its content: NCCL's if that recorded something, else gloo's."""
    from torch._C import _distributed_c10d

    with _inductor_not_imported():
        for name in ("_dump_nccl_trace", "_dump_fr_trace"):
            if dump := getattr(_distributed_c10d, name, None):
                raw: bytes = dump()
                recorded: dict[str, Any] = pickle.loads(raw)  # noqa: S301 - written by this process
                if recorded.get("entries") or name == "_dump_fr_trace":
                    return (pickle.dumps(recorded), recorded) if _named(recorded) else (raw, recorded)
    return b"", {}


def _named(recorded: dict[str, Any]) -> bool:
    """Name the group where gloo's recorder has left the name out, without which ``torchfrtrace`` fails."""
    if "" not in recorded.get("pg_config", {}):
        return False
    groups = {tuple(entry["process_group"]) for entry in recorded.get("entries", ())}
    if len(groups) != 1:
        return False
    [(name, description)] = groups
    recorded["pg_config"][name] = recorded["pg_config"].pop("") | {"name": name, "desc": description}
    return True


@contextlib.contextmanager
def _inductor_not_imported() -> Iterator[None]:
    """Keep the recorder from importing ``torch._inductor``, which takes seconds, longer than the launcher waits.

    To name the frames of a stack, PyTorch asks whether ``torch._inductor`` has compiled them. ``torch`` imports that
    module when it is asked for it, so it is given an empty one. A program that has imported it keeps it.
    """
    import torch

    if "_inductor" in vars(torch):
        yield
        return
    empty = ModuleType("torch._inductor")
    vars(torch)["_inductor"] = empty
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is empty:  # else the program has imported it meanwhile
            del vars(torch)["_inductor"]


def training_frame(stacks: str) -> str | None:
    """Return ``file.py:line`` of the training thread's innermost frame of this package in a faulthandler dump."""
    package = Path(__file__).parent
    for thread in stacks.split("\n\n"):
        frames = [(Path(m["file"]), m["line"]) for m in _FRAME.finditer(thread)]
        ours = [(path.name, line) for path, line in frames if package in path.parents]
        if any(name == "worker.py" for name, _ in ours):  # only the training thread runs worker.py
            # Frames of the heartbeat and of fault injection wrap the work and say nothing about it.
            work = [frame for frame in ours if frame[0] not in ("heartbeat.py", "fault_injection.py")] or ours
            return f"{work[0][0]}:{work[0][1]}"
    return None
