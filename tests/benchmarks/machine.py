"""What a figure was measured on: without it a figure says nothing."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from tests.kind.toolchain import KUBERNETES_VERSION


def describe_machine(*, kubernetes: bool = True) -> str:
    """Processor, cores, kernel, versions, date and what else the machine is doing, in one line."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    cluster = f"Kubernetes {KUBERNETES_VERSION}, " if kubernetes else ""
    day = datetime.now(UTC).date().isoformat()
    return (
        f"{cores} cores of {_processor()}, Linux {platform.release().split('-')[0]}, "
        f"{cluster}Python {python}, {day}, load average {os.getloadavg()[0]:.1f}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
