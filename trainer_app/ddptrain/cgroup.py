"""What the container grants and whom it killed: the control groups of this process, in either version.

``cpus`` asks for the quota before threads are counted; ``launch`` asks for the kills, before and after its ranks lived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


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
