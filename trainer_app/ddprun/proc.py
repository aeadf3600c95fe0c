"""What proc(5) shows of processes: state, children, and what they use; 0 or nothing of a process that has ended."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PF_EXITING = 4  # linux/sched.h
_FLAGS, _TIMES = 6, slice(11, 13)  # fields of ``stat`` after the name: flags; ticks in user mode and in the kernel


def _text(place: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", place).read_text()
    return ""


def _stat(place: str) -> list[str]:
    return _text(f"{place}/stat").rpartition(")")[2].split()


def _fields(place: str) -> dict[str, str]:
    """Return the lines ``name: value [unit]`` of a file."""
    named = (line.partition(":") for line in _text(place).splitlines())
    return {name: value.split()[0] for name, _, value in named if value.strip()}


def state(pid: int) -> str:
    """Return the letter of its state: R running, S sleeping, D disk wait, T stopped, Z ended and not collected."""
    return next(iter(_stat(str(pid))), "")


def is_exiting(pid: int) -> bool:
    """Return whether the process has begun to end. Its connections are closed after that, and its parent hears last."""
    found = _stat(str(pid))
    return not found or bool(int(found[_FLAGS]) & _PF_EXITING)


def is_running(pid: int) -> bool:
    """Return whether a thread of the process runs, or waits for a core or a disk."""
    return any(_stat(f"{pid}/task/{thread}")[:1] in (["R"], ["D"]) for thread in _threads(pid))


def catches(pid: int, number: int) -> bool | None:
    """Return whether the process has a handler for the signal; None if that is not known."""
    mask = _fields(f"{pid}/status").get("SigCgt")
    return None if mask is None else bool(int(mask, 16) >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    """Return what the threads of the process have started, and what it has adopted."""
    return [int(child) for thread in _threads(pid) for child in _text(f"{pid}/task/{thread}/children").split()]


def tree(pid: int) -> Iterator[int]:
    """Yield the process and all that it has started."""
    yield pid
    for child in children(pid):
        yield from tree(child)


def _threads(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [thread.name for thread in Path(f"/proc/{pid}/task").iterdir()]
    return []


def main_thread_work(pid: int) -> int:
    """Return a number that grows with all that the main thread does: its CPU time, and how often it slept."""
    thread = f"{pid}/task/{pid}"
    return sum(map(int, (*_stat(thread)[_TIMES], _fields(f"{thread}/status").get("voluntary_ctxt_switches", 0))))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the process."""
    return sum(map(int, _stat(str(pid))[_TIMES])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the memory that the process has, in pages that others may share."""
    pages = _text(f"{pid}/statm").split()[1:2]
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")
