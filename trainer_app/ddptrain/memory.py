"""Whether the kernel has killed for memory: SIGKILL alone does not tell who sent it, the cgroup's counter does."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddptrain.cpus import cgroup_directories


def oom_kills(root: Path = Path("/")) -> int:
    """Processes killed so far for the limits of this process's cgroup and those above it; 0 where nobody counts."""
    total = 0
    for directory in cgroup_directories("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in (directory / name).read_text().splitlines())
                total += int(fields.get("oom_kill", 0))
    return total
