"""CPUs, memory and GPUs of this process: threads per rank, settings of the C library, control groups, GPU count.

Everything here works without torch and before it is imported.
"""

import contextlib
import ctypes
import gc
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def available_cpus(root: Path = Path("/")) -> float:
    """Return the CPUs of this process: its affinity, or the lowest quota (v2 and v1) of its cgroup and those above."""
    cpus = float(len(os.sched_getaffinity(0)))
    for directory in _directories("cpu", root):
        v2 = directory / "cpu.max"
        files = [v2] if v2.exists() else [directory / "cpu.cfs_quota_us", directory / "cpu.cfs_period_us"]
        with contextlib.suppress(OSError, ValueError):  # no limit: cpu.max holds "max 100000"
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
            if quota > 0 and period > 0:  # no limit: cpu.cfs_quota_us holds -1
                cpus = min(cpus, quota / period)
    return cpus


def threads_per_rank(local_ranks: int, env: Mapping[str, str] = os.environ) -> int:
    """Return the threads for each of ``local_ranks`` ranks: OMP_NUM_THREADS, else an equal share of the CPUs.

    A rank with more threads than CPUs waits for its own threads: several times slower, measured.
    """
    given = env.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, math.floor(available_cpus() / local_ranks + 0.01))


def set_torch_defaults() -> None:
    """Set, before torch is imported, the environment variables that the user has not set.

    OpenMP's threads spin at every barrier by default. If another process wants the core, each barrier then costs a
    scheduler tick: a training step took 520 ms instead of 105 ms on two busy cores.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy computes nothing here; forks would inherit its threads
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer prints thirty lines of C++ stack otherwise


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without garbage collections: torch makes a million objects, all of which stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_freed_memory() -> None:
    """Make the C library keep the memory of one training step for the next, instead of returning it to the kernel.

    Otherwise activations of a few megabytes are mapped again at every step, and the kernel clears each of their pages:
    a third of a step's CPU time, measured with glibc.
    """
    with contextlib.suppress(AttributeError, OSError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for the memory limits of this process's cgroups; 0 if unknown.

    An exit by SIGKILL alone does not show whether the out-of-memory killer sent it.
    """
    total = 0
    for directory in _directories("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in (directory / name).read_text().splitlines())
                total += int(fields.get("oom_kill", 0))
    return total


def throttled_seconds(root: Path = Path("/")) -> float:
    """Return for how long the CPU limits of this process's cgroups have stopped its threads; 0 without a limit."""
    longest = 0.0
    for directory in _directories("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in (directory / "cpu.stat").read_text().splitlines())
            v2, v1 = int(fields.get("throttled_usec", 0)) / 1e6, int(fields.get("throttled_time", 0)) / 1e9
            longest = max(longest, v2, v1)
    return longest


def _directories(controller: str, root: Path) -> Iterator[Path]:
    """Yield this process's cgroup (v2 and v1) and all above it: the container or the pod may hold the limit."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    places = {base, base / controller, base / "cpu,cpuacct"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = base if not controllers else base / controllers
        if not controllers or controller in controllers.split(","):
            here = Path(path.lstrip("/"))
            places |= {mount / part for part in (here, *here.parents)}
    yield from places


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that this process may use, by their device files."""
    present = len([p for p in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", p.name)])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"]))
