"""Describes the machine of a measurement, and writes tables into docs/develop/benchmarks.md between markers."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.kind.toolchain import KUBERNETES_VERSION

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "benchmarks.md"


def describe_machine(*, kubernetes: bool = True, version: str = KUBERNETES_VERSION) -> str:
    """Return processor, cores, kernel, versions, date and load average in one line."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    cluster = f"Kubernetes {version}, " if kubernetes else ""
    day = datetime.now(UTC).date().isoformat()
    return (
        f"{cores} cores of {_processor()}, Linux {platform.release().split('-')[0]}, "
        f"{cluster}Python {python}, {day}, load average {os.getloadavg()[0]:.1f}"
    )


def percentile95(values: Sequence[float]) -> float:
    """Return the value that 95 % of the values do not exceed."""
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace the text between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, opened, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise SystemExit(f"{page} has no section {begin} ... {end}: add the two markers where the table should be")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
