"""What the processor and the C library need to be told: how many threads there is a CPU for, which of them may spin.

``cli`` and ``launch`` call ``calm_torch`` before anything imports torch, ``worker`` the rest when its rank begins. A
rank with more threads than CPUs spends its time waiting for its own threads: several times slower, measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ddptrain.cgroup import cpu_quotas

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def available(root: Path = Path("/")) -> float:
    """CPUs by affinity and by the tightest cgroup quota (v2 and v1) above this process."""
    cpus = float(len(os.sched_getaffinity(0)))
    return min([cpus, *cpu_quotas(root)])


def threads_per_rank(local_ranks: int, env: Mapping[str, str] = os.environ) -> int:
    """Threads for one of ``local_ranks`` on this node; OMP_NUM_THREADS, where the user set it, has the last word."""
    given = env.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, math.floor(available() / local_ranks + 0.01))


def calm_torch(env: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Before torch is imported: keep idle threads from burning the peers' quota, and C++ traces out of the log.

    OpenMP's threads spin at every barrier by default. Where another process wants the core, each barrier then costs a
    scheduler tick: a training step took 520 ms instead of 105 ms on two busy cores.
    """
    env.setdefault("GOMP_SPINCOUNT", "1000")
    env.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # NumPy computes nothing here; its thread pool would only be forked around
    env.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # a lost peer otherwise prints thirty lines of stack before its one of meaning


def keep_freed_memory() -> None:
    """Let the C library keep the memory of one training step for the next, instead of returning it to the kernel.

    Activations of a few megabytes are otherwise mapped anew at every step, and each time the kernel clears every
    page of them: a third of a step's CPU time, measured with glibc.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library has no mallopt, and no need of it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)
