"""What the benchmarks share: measurements in turns, the command line, the machine, and tables.

A table goes into docs/develop/benchmarks.md between markers.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tests.kind.toolchain import KUBERNETES_VERSION

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "benchmarks.md"
T = TypeVar("T")


def in_turns(measures: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """Return the results of each measure, which alternate: other work on the machine changes all of them.

    The order is reversed in every second turn, because the second may find warmer caches.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    for turn in range(repetitions):
        for name in list(measures)[:: 1 if turn % 2 else -1]:
            found[name].append(measures[name]())
    return found


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the flag that ``print_table`` reads."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    return parser


def print_table(options: argparse.Namespace, name: str, shown: str) -> None:
    """Print a table, and with ``--write`` put it into the section ``name``."""
    print(shown)
    if options.write:
        write_section(name, shown)


def table_of(heading: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table; the first ``names`` columns are aligned to the left."""
    rule = "|".join("---" if number < names else "---:" for number in range(len(heading)))
    return "\n".join([f"| {' | '.join(heading)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])


def describe_machine(*, kubernetes: bool = True) -> str:
    """Return processor, cores, kernel, versions, date and load average in one line."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    cluster = f"Kubernetes {KUBERNETES_VERSION}, " if kubernetes else ""
    day = datetime.now(UTC).date().isoformat()
    return (
        f"{cores} cores of {_processor()}, Linux {platform.release().split('-')[0]}, "
        f"{cluster}Python {python}, {day}, load average {os.getloadavg()[0]:.1f}"
    )


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
