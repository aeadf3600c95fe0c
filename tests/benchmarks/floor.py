"""What the benchmarks beside a floor share: the row, the table and the command line.

The floor is the time for the same pods, POSTed concurrently without an operator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from tests.benchmarks.report import describe_machine, write_section
from tests.kind import prepare

SIZES = (1, 8, 32, 64)
NAMESPACE = "default"


@dataclass(frozen=True)
class Aim:
    """The longest time that the operator may take: a multiple of the floor, and a constant."""

    factor: float
    constant_ms: float

    def ms(self, floor_ms: float) -> float:
        return round(self.factor * floor_ms + self.constant_ms, 1)

    def __str__(self) -> str:
        return f"floor × {self.factor:g} + {self.constant_ms:g} ms"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The medians for one size, in milliseconds."""

    nodes: int
    floor_ms: float
    operator_ms: float
    aim_ms: float

    @property
    def holds(self) -> bool:
        return self.operator_ms <= self.aim_ms

    def cells(self) -> list[str]:
        """Return the cells of the first columns, as in ``table_lines``."""
        aim = "held" if self.operator_ms <= self.aim_ms else "missed"
        return [
            str(self.nodes),
            f"{self.floor_ms:,.1f} ms",
            f"**{self.operator_ms:,.1f} ms**",
            f"{self.aim_ms:,.1f} ms ({aim})",
        ]


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Result(Generic[R]):
    """A finished measurement; ``more``: further figures by name."""

    machine: str
    repetitions: int
    rows: Sequence[R]
    more: Mapping[str, Any]

    def wire(self) -> dict[str, Any]:
        rows = [asdict(row) | {"holds": row.holds} for row in self.rows]
        return {"machine": self.machine, "repetitions": self.repetitions, "rows": rows} | dict(self.more)

    def source(self) -> str:
        """Return the line that says where the figures come from."""
        return f"Medians of {self.repetitions} repetitions on {self.machine}."


def table_lines(result: Result[R], aim: Aim, operator: str, more: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of the Markdown table; ``more`` has the milliseconds of further columns, by heading."""
    heads = ["nodes", "floor: concurrent POSTs", operator, f"aim: {aim}", *more]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for row, *others in zip(result.rows, *more.values(), strict=True):
        lines.append(f"| {' | '.join([*row.cells(), *(f'{ms:,.1f} ms' for ms in others)])} |")
    return lines


def main(
    name: str,
    doc: str | None,
    repetitions: int,
    measure: Callable[[Sequence[int], int], Coroutine[Any, Any, tuple[Sequence[R], Mapping[str, Any]]]],
    table: Callable[[Result[R]], str],
) -> int:
    """Parse the command line, measure and print. The exit code is 0 if the targets are met at every size, else 1.

    Args:
        name: of the module; with hyphens, of the section in docs/develop/benchmarks.md.
        doc: text for ``--help``.
        repetitions: by default.
        measure: returns the rows for some sizes, and more figures.
        table: returns the result as Markdown.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    prepare.ensure("etcd", "kube-apiserver")
    machine = describe_machine()  # before the benchmark's own load
    rows, more = asyncio.run(measure(options.sizes, options.repetitions))
    result = Result(machine, options.repetitions, rows, more)
    print(json.dumps({"benchmark": name} | result.wire(), indent=2) if options.json else table(result))
    if options.write:
        write_section(name.replace("_", "-"), table(result))
    return 0 if all(row.holds for row in rows) else 1
