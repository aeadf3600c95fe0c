"""What a launcher can still read of a rank that hangs: its breadcrumbs, its Python stacks, its flight recorder.

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
from dataclasses import dataclass
from pathlib import Path

from ddptrain import breadcrumbs

DUMP_SIGNAL = signal.SIGUSR1
_MOST = 8 * 2**20  # bytes of a dump that are worth keeping
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class BlackBox:
    """File descriptors, the same in the launcher and in the rank."""

    crumbs: int
    stacks: int
    flight: int

    @classmethod
    def create(cls, rank: int) -> BlackBox:
        names = ("crumbs", "stacks", "flight")
        box = cls(*(os.memfd_create(f"ddptrain-{name}-{rank}", 0) for name in names))
        os.ftruncate(box.crumbs, breadcrumbs.SIZE)
        return box

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.crumbs, self.stacks, self.flight

    def memory(self) -> memoryview:
        """The crumbs, shared with whoever else maps them."""
        return memoryview(mmap.mmap(self.crumbs, breadcrumbs.SIZE))

    def crumb(self) -> breadcrumbs.Crumb:
        return breadcrumbs.read(os.pread(self.crumbs, breadcrumbs.SIZE, 0))

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


def answer_with_stacks(box: BlackBox) -> None:
    """In the rank's main thread: from now on DUMP_SIGNAL writes all stacks into the box, then wakes the guard."""
    signal.signal(DUMP_SIGNAL, lambda *_: None)  # so that Python's own handler writes the signal to the wakeup pipe
    faulthandler.register(DUMP_SIGNAL, file=box.stacks, all_threads=True, chain=True)


def dump_flight_recorder(descriptor: int) -> None:
    """The last collectives of this rank as JSON, where the build of PyTorch has a recorder. Never raises."""
    with contextlib.suppress(Exception):  # a private function: whatever it does in another version, we go on dying
        from torch._C import _distributed_c10d

        recorded = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]  # noqa: S301 - our own bytes
        os.pwrite(descriptor, json.dumps(recorded, default=str).encode()[:_MOST], 0)


def place_in(stacks: str) -> str | None:
    """``file.py:line`` of the training thread's innermost frame of this package, out of faulthandler's dump."""
    folder = Path(__file__).parent
    for thread in re.split(r"\n\n", stacks):
        frames = [(Path(m["file"]), m["line"]) for m in _FRAME.finditer(thread)]
        ours = [(path.name, line) for path, line in frames if path.parent == folder]
        if ours and any(name == "worker.py" for name, _ in ours):  # the guard's thread never passes there
            # What merely wraps the waiting says less than where the loop stands.
            telling = [pair for pair in ours if pair[0] not in ("breadcrumbs.py", "chaos.py")] or ours
            return f"{telling[0][0]}:{telling[0][1]}"
    return None
