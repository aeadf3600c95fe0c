"""What the processor and the C library need to be told: how many threads there is a CPU for, which of them may spin.

``cli`` and ``launcher`` call ``set_torch_defaults`` before torch is imported; ``worker`` calls the rest. A
rank with more threads than CPUs spends its time waiting for its own threads: several times slower, measured.

What the container grants and whom it killed: the control groups of this process, in either version.

``cpus`` asks for the quota before threads are counted; ``launch`` asks for the kills, before and after its ranks lived.

Whether this node has a GPU for each of its ranks, told without torch and before anything slow is imported.

``cli`` asks before it launches, or becomes, a rank. Which of the GPUs a rank takes is for ``device`` to say, later.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddptrain.errors import RanksError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def available_cpus(root: Path = Path("/")) -> float:
    """CPUs by affinity and by the tightest cgroup quota (v2 and v1) above this process."""
    cpus = float(len(os.sched_getaffinity(0)))
    return min([cpus, *cpu_quotas(root)])


def threads_per_rank(local_ranks: int, env: Mapping[str, str] = os.environ) -> int:
    """Threads for one of ``local_ranks`` on this node; OMP_NUM_THREADS, where the user set it, has the last word."""
    given = env.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, math.floor(available_cpus() / local_ranks + 0.01))


def set_torch_defaults(env: dict[str, str] | os._Environ[str] = os.environ) -> None:
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


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """CPUs that this process's cgroup and each of those above it grant; none of those that set no limit."""
    for directory in _directories("cpu", root):
        try:
            quota, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                quota = (directory / "cpu.cfs_quota_us").read_text().strip()
                period = (directory / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        if quota.isdecimal() and int(quota) > 0 and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period)


def oom_kills(root: Path = Path("/")) -> int:
    """Processes killed so far for the limits of this process's cgroup and those above it; 0 where nobody counts.

    SIGKILL alone does not tell who sent it; this counter does.
    """
    total = 0
    for directory in _directories("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in (directory / name).read_text().splitlines())
                total += int(fields.get("oom_kill", 0))
    return total


def _directories(controller: str, root: Path) -> Iterator[Path]:
    """This process's cgroup (v2 and v1) and all above it: a pod's limit may stand at the container or at the pod."""
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


def check_gpus(backend: str, device: str, nproc_per_node: int, env: Mapping[str, str] = os.environ) -> None:
    """Refuse NCCL with more local ranks than GPUs, by counting device files: no CUDA context, no torch.

    Raises:
        RanksError: NCCL or CUDA was asked for by name and the GPUs seen are too few.
    """
    if backend != "nccl" and device != "cuda":
        return
    if Path("/dev/dxg").exists():  # WSL shows no per-card files; torch will count
        return
    present = len([p for p in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", p.name)])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        present = min(present, len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"]))
    if nproc_per_node > present:
        raise RanksError(
            f"{nproc_per_node} rank(s) on this node want a GPU each, but {present} GPU(s) are here",
            hint="NCCL allows one rank per GPU",
            next_step="lower NPROC_PER_NODE, request more GPUs, or use --device cpu --backend gloo",
        )
