"""A rank's heartbeat: what it does and when it last made progress, in memory that its launcher reads at any time.

A rank that is stopped, or that waits inside C++ for a peer, cannot report; its last heartbeat shows what it was doing.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Changes, step, collectives begun, process, CLOCK_MONOTONIC seconds, limit in seconds, phase, collective. In the byte
# order of the machine, which all readers share, so that ``memoryview.cast`` can write single numbers.
_LAYOUT = struct.Struct("=qqqqdd24s40s")
_COUNTS, _TIME = struct.Struct("=qqq"), struct.Struct("=d")
_TIME_AT = struct.calcsize("=qqqq")
_WAITED_AT = _LAYOUT.size  # seconds of waiting for data
SIZE = _LAYOUT.size + _TIME.size
RETURNED = "close"  # of a script's rank: it has returned, and its process ends
# In these phases there is no progress that a stop could save.
BEFORE_TRAINING = ("start", "rendezvous", "data", "setup", "resume")


def activity(phase: str, collective: str) -> str:
    """Return what a rank is doing as text: ``in all_reduce``, ``in phase save``."""
    return f"in {collective}" if collective else f"in phase {phase}"


@dataclass(frozen=True)
class HeartbeatRecord:
    """The newest heartbeat of one rank.

    Attributes:
        process: that has written it: the rank's own, or one that its script has started.
        limit: seconds without a change that this phase may take; 0 for the limit of the observer.
        collective: what the rank waits in; empty while it works by itself.
        waited: seconds that it has waited for data in all.
    """

    changes: int = 0
    step: int = 0
    collectives: int = 0
    process: int = 0
    time: float = 0.0
    limit: float = 0.0
    phase: str = "start"
    collective: str = ""
    waited: float = 0.0

    @classmethod
    def unpack(cls, memory: bytes | memoryview) -> "HeartbeatRecord":
        """Read the record from ``memory``. The write is not atomic, but a rank that hangs does not write."""
        changes, step, collectives, process, at, limit, phase, collective = _LAYOUT.unpack_from(memory)
        text = [part.rstrip(b"\0").decode(errors="replace") for part in (phase, collective)]
        (waited,) = _TIME.unpack_from(memory, _WAITED_AT)
        return cls(changes, step, collectives, process, at, limit, text[0] or "start", text[1], waited)


class StallTimer:
    """Measures how long a heartbeat has not changed, by the observer's clock.

    If the observer itself was stopped (a paused container), at most two intervals of that time are counted.

    Args:
        interval: seconds between two observations.
    """

    def __init__(self, interval: float) -> None:
        self._longest, self._observed = 2 * interval, time.monotonic()
        self._seen: object = None
        self.seconds = 0.0

    def observe(self, seen: object) -> float:
        """Return the seconds for which the same has been seen, such as the newest heartbeat's ``changes``."""
        now = time.monotonic()
        elapsed, self._observed = min(now - self._observed, self._longest), now
        self.seconds = 0.0 if seen != self._seen else self.seconds + elapsed
        self._seen = seen
        return self.seconds


class Heartbeat:
    """Writes one rank's heartbeat.

    Args:
        memory: SIZE bytes shared with the launcher; private memory if None.
        on_mark: called with (phase or collective, step) as each begins; fault injection hooks in here.
        may_write: whether this process may; a script may start several, which share the memory.

    Attributes:
        data_wait: seconds in which this process waited for data that are not in the record yet: ``mark`` and ``touch``
            add them to it. A wait is no sign of life.
    """

    def __init__(
        self,
        memory: memoryview | None = None,
        on_mark: Callable[[str, int], None] | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._memory = memory if memory is not None else memoryview(bytearray(SIZE))
        # After a training step the caches have nothing of this code: three calls of ``struct`` cost 7 µs then, these 3.
        self._counts = self._memory[:_TIME_AT].cast("q")
        self._time, self._waited = (self._memory[at : at + _TIME.size].cast("d") for at in (_TIME_AT, _WAITED_AT))
        self._on_mark, self._may_write = on_mark, may_write
        self.data_wait = 0.0
        self._phase, self._collective, self._limit = b"start", b"", 0.0
        self.touch()

    @property
    def last(self) -> HeartbeatRecord:
        """The newest record; safe to read from another thread."""
        return HeartbeatRecord.unpack(self._memory)

    @property
    def waited(self) -> float:
        """Seconds of waiting for data in all, also those that are not in the record yet."""
        return self._waited[0] + self.data_wait

    def mark(self, phase: str, step: int | None = None, *, limit: float = 0.0) -> None:
        """Record that the rank begins ``phase``, and ``step`` (counting from 1) if the phase has one.

        Args:
            limit: seconds without a heartbeat that make a hang in this phase, if they are more than elsewhere.
        """
        self._phase, self._limit = phase.encode()[:24], limit
        self._write(step)
        self._tell(phase)

    def touch(self) -> None:
        """Record a sign of life without a new phase: for loops that poll and have a timeout of their own."""
        self._write()

    def count(self, step: int | None, now: float) -> bool:
        """Record a step of the phase, at less cost than ``mark``; return False, and do nothing, if this needs a mark.

        Only for the process whose ``mark`` was the last.

        Args:
            step: None for one without a number.
            now: of CLOCK_MONOTONIC, in seconds.
        """
        if self._phase != b"train" or self._on_mark:
            return False
        self._counts[0] += 1
        if step is not None:
            self._counts[1] = step
        self._time[0] = now
        return True

    def _write(self, step: int | None = None, begun: int = 0) -> None:
        """Write the record; its numbers continue those in the memory, which may be of another process."""
        waited, self.data_wait = self.data_wait, 0.0
        if not self._may_write():
            return
        self._waited[0] += waited
        changes, before, collectives = _COUNTS.unpack_from(self._memory)
        _LAYOUT.pack_into(
            self._memory, 0, changes + 1, before if step is None else step, collectives + begun, os.getpid(),
            time.monotonic(), self._limit, self._phase, self._collective,
        )  # fmt: skip

    def _tell(self, place: str) -> None:
        if self._on_mark and self._may_write():
            self._on_mark(place, _COUNTS.unpack_from(self._memory)[1])

    @contextlib.contextmanager
    def waiting_in(self, collective: str, *, counted: bool = True) -> Iterator[None]:
        """Record that the rank waits for its peers in ``collective`` until the context ends.

        Args:
            counted: False for waits that not every rank does, such as for the store. The count shows who is behind.
        """
        self._collective = collective.encode()[:40]
        self._write(begun=counted)
        try:
            self._tell(collective)
            yield
        finally:
            self._collective = b""
            self.touch()
