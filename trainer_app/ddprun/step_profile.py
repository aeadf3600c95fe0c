"""Profiles some steps of a rank when its launcher asks for it: ``torch.profiler``, without a line in the script.

The request is in memory that the launcher writes. The hook of the optimizer sees it at most 0.1 s later, and begins and
ends the profiler between two steps. Only the thread that trains can end it; a test of the model, or a step that hangs,
has no hook, so a thread that watches makes the interpreter end the profile there between two instructions.
The trace goes to the same memory file; on the way it is in a temporary file, because PyTorch writes only to a path. An
error of the profiler is a part of the rank's report, and no error of the script.
"""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

from ddprun import shared_text
from ddprun.shared_text import SharedText

_REQUEST = struct.Struct("=qqqdd")
_REQUEST_AT = shared_text.SIZE  # after the report of the rank
SIZE = TRACE_AT = _REQUEST_AT + mmap.PAGESIZE
LONGEST = 32 * 2**20  # bytes of a compressed trace, in memory of the pod
_PART = 2**20  # bytes
# The end of a profile stops the rank for some 10 ms for each MiB that was recorded, and takes five times its memory.
_MOST_MEMORY = 48 * 2**20  # bytes; at the end of a step, when the memory is what it was before the profile
_MOST_PEAK = 96 * 2**20  # bytes above what the process has ever had, also within a step
_LONGER, _SHORTEST = 4, 3.0  # times the longest step before it, seconds; a rank waits while the profile of another ends
_WATCHED = 0.05  # seconds
_LATE = 2.0  # seconds after the end of the time in which the last step may end
_LONGEST_ERROR = 300  # characters


@dataclass(frozen=True)
class ProfileRequest:
    """What a launcher asks for.

    Attributes:
        number: grows with each request; 0 for none.
        begin: the rank begins when it has completed this step, so that all ranks begin at the same one.
        steps: to be profiled. The step before them warms the profiler up.
        latest: CLOCK_MONOTONIC, when a rank begins at any step: it may number its steps in another way.
        until: CLOCK_MONOTONIC, when the profile ends with the steps that it has.
    """

    number: int = 0
    begin: int = 0
    steps: int = 0
    latest: float = 0.0
    until: float = 0.0

    def write(self, descriptor: int) -> None:
        """Write it to the memory file of a rank, the number last: it makes the rank read the rest."""
        content = _REQUEST.pack(*astuple(self))
        os.pwrite(descriptor, content[8:], _REQUEST_AT + 8)
        os.pwrite(descriptor, content[:8], _REQUEST_AT)


def report(descriptor: int) -> dict[str, Any]:
    """Return what the rank has reported last: number, state, first, steps, bytes, error. Empty for nothing."""
    with contextlib.suppress(ValueError):
        found = json.loads(shared_text.read(os.pread(descriptor, shared_text.SIZE, 0)))
        return found if isinstance(found, dict) else {}
    return {}


class StepProfiler:
    """The rank's side.

    Args:
        descriptor: of a file of SIZE bytes that is shared with the launcher.
        touch: gives a sign of life: the end of a profile takes time, and is no hang.
    """

    def __init__(self, descriptor: int, touch: Callable[[], object]) -> None:
        memory = memoryview(mmap.mmap(descriptor, SIZE))
        self._descriptor, self._file, self._touch = descriptor, os.fstat(descriptor).st_ino, touch
        self._report, self._memory = SharedText(memory[: shared_text.SIZE]), memory
        self._number = memory[_REQUEST_AT : _REQUEST_AT + 8].cast("q")
        self._asked: ProfileRequest | None = None  # and not finished
        self._seen = 0
        self._profile: Any = None
        self._restore: Callable[[], None] = lambda: None  # undoes ``_give_way``
        self._first = self._made = self._resident = self._peak = 0
        self._stepped = self._longest = 0.0  # when the last step ended; seconds of the longest, 0 for not known
        self._is_turning = False
        self._interrupt = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._give_up)

    def turn(self, number: Callable[[], int]) -> bool:
        """Take note of a step that has ended, in its thread; return whether the next one is to be told, too.

        Args:
            number: returns that of the step.
        """
        if self._asked is None and self._number[0] == self._seen:
            return False
        is_main = threading.current_thread() is threading.main_thread()
        if self._profile is not None and not is_main:
            return True
        self._is_turning = True
        try:
            if not is_main:
                self._seen = self._number[0]
                raise RuntimeError("another thread than the main one makes the steps")
            return self._turn(number(), time.monotonic())
        except Exception as error:
            self._end(error)
            return False
        finally:
            self._is_turning = False

    def _turn(self, step: int, now: float) -> bool:
        if self._number[0] != self._seen:
            if self._profile is not None:
                self._end(RuntimeError("another profile was asked for"))
            self._seen = self._number[0]
            self._asked = ProfileRequest(*_REQUEST.unpack_from(self._memory, _REQUEST_AT))
            self._stepped = self._longest = 0.0
            self._tell("waits")
        asked = self._asked
        assert asked is not None
        self._longest = max(self._longest, now - self._stepped) if self._stepped else 0.0
        self._stepped = now
        if self._profile is not None:
            self._profile.step()
            self._made += 1
            if self._made == 1:  # the step before it warms the profiler up
                self._resident = _resident()
            has_all = self._made > asked.steps or now >= asked.until
            if has_all or (self._made > 1 and _resident() - self._resident > _MOST_MEMORY):
                self._finish()
                return False
        elif now >= asked.until:
            raise TimeoutError("no step ended in time")
        elif step >= asked.begin or now >= asked.latest:
            self._start(step, asked.steps)
        return True

    def _start(self, step: int, steps: int) -> None:
        torch = sys.modules["torch"]
        from torch.profiler import ProfilerActivity, profile, schedule

        if torch.autograd._profiler_enabled():
            raise RuntimeError("the script runs a profiler itself")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else ())]
        self._made, self._first = 0, step + 2
        own = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1))
        self._profile = own
        own.start()  # for the first time in a process it takes memory that stays
        self._peak = _peak()
        self._give_way(own)
        self._tell("profiles")
        threading.Thread(target=self._watch, args=(own,), name="ddprun-profile", daemon=True).start()

    def _watch(self, own: Any) -> None:
        while self._profile is own:
            if self._excess():
                ctypes.pythonapi.Py_AddPendingCall(self._interrupt, None)  # runs in the main thread
            time.sleep(_WATCHED)

    def _excess(self) -> str:
        """Return why the step in progress is not profiled to its end; empty if it is."""
        asked = self._asked
        if asked is None:
            return ""
        now, limit = time.monotonic(), max(_LONGER * self._longest, _SHORTEST)
        if self._longest and now >= self._stepped + limit:
            return f"a step takes more than {limit:.1f} s, far more than those before: does the script test its model?"
        if now >= asked.until + _LATE:
            return "the step did not end in time: give it more"
        if _peak() - self._peak > _MOST_PEAK:
            return f"a step takes more than {_MOST_PEAK >> 20} MiB: too many operations, or a test of the model"
        return ""

    def _give_up(self, _: object) -> int:
        """In the main thread, between any two instructions: end a profile that has passed its limits."""
        if self._profile is not None and not self._is_turning and (excess := self._excess()):
            self._end(RuntimeError(excess))
        return 0

    def _give_way(self, own: Any) -> None:
        """End the profile when the script begins one: some releases of PyTorch raise if two run."""
        from torch.autograd.profiler import profile as of_torch

        prepare: Any = of_torch._prepare_trace

        def prepared(other: Any) -> None:
            if self._profile is own and other is not own.profiler:
                self._end(RuntimeError("the script has begun a profile itself"))
            prepare(other)

        of_torch._prepare_trace = prepared  # type: ignore[method-assign]
        self._restore = lambda: setattr(of_torch, "_prepare_trace", prepare)

    def _finish(self) -> None:
        own, self._profile, self._asked = self._profile, None, None
        try:
            own.stop()
        finally:
            self._restore()
            self._touch()
        steps, number, first = self._made - 1, self._seen, self._first
        self._tell("writes")

        def write() -> None:
            told: dict[str, object] = {"number": number, "first": first, "steps": steps}
            try:
                told |= {"state": "done", "bytes": self._write(own)}
            except Exception as error:
                told |= {"state": "failed", "error": _text(error)}
            if self._seen == number:
                self._report.write(json.dumps(told))

        threading.Thread(target=write, name="ddprun-profile", daemon=True).start()

    def _write(self, own: Any) -> int:
        """Write the trace to the memory file, and return its compressed size. PyTorch writes only to a path."""
        import tempfile

        # The links lead PyTorch to a file without a name, which nobody has to delete if the process is ended.
        with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory(prefix="ddprun-profile-") as folder:
            path = Path(folder) / "trace.json"
            for link in (path, path.with_name("trace.json.tmp")):  # some releases write that, and rename it
                link.symlink_to(f"/proc/self/fd/{file.fileno()}")
            own.export_chrome_trace(str(path))
            written = 0
            for part in _compressed(file):
                written += len(part)
                if written > LONGEST:
                    raise ValueError(f"the trace is longer than {LONGEST >> 20} MiB: ask for fewer steps")
                if os.fstat(self._descriptor).st_ino != self._file:
                    raise OSError("the script has closed the descriptors of ddprun")
                os.pwrite(self._descriptor, part, TRACE_AT + written - len(part))
        return written

    def _end(self, error: Exception) -> None:
        """Give the profile up."""
        own, self._profile, self._asked = self._profile, None, None
        with contextlib.suppress(Exception):
            self._tell("failed", error=_text(error))
        if own is not None:
            with contextlib.suppress(Exception):
                self._restore()
                own.stop()
            self._touch()

    def _tell(self, state: str, **fields: object) -> None:
        told = {"number": self._seen, "state": state, "first": self._first, "steps": self._made - 1}
        self._report.write(json.dumps(told | fields))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _resident() -> int:
    """Return the memory of the process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _peak() -> int:
    """Return the most memory that the process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compressed(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the file in the format of gzip."""
    packer = zlib.compressobj(1, wbits=31)
    file.seek(0)
    while part := file.read(_PART):
        yield packer.compress(part)
    yield packer.flush()
