"""Measure what one plan costs, alone or beside another checkout of this repository.

    python -m tests.benchmarks.plan                      # table on standard output
    python -m tests.benchmarks.plan --against ../before  # with the ratio to that checkout
    python -m tests.benchmarks.plan --against ../before --write

*First plan*: a new job, with no status and no pods; the plan renders all pods. *Re-plan*: all pods of the job run, the
status is recorded, and one pod changed. Its new version enters the cache, and the job is planned again, as after a
watch event. The time contains the cache, the selection of the job's pods and the plan, but no request. As in the
operator, a re-plan uses the spec that the plan before it parsed.

Each measurement is a process of its own. Both checkouts alternate, and the fastest of several runs counts, because
other work on the machine only adds time. The other checkout is run with its own ``.venv`` if it has one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.benchmarks.report import describe_machine, in_turns, parser_of, print_table, table_of

SIZES = (1, 8, 64, 1000, 4096)
ROUNDS = 3
COST = Path("tests", "benchmarks", "plan_cost.py")
"""Each checkout runs its own file, because the modules of the operator can have other names there."""
AIMS_MS = {1: 1.0, 1000: 5.0}
"""The longest re-plan for a number of nodes."""


def _in_checkout(folder: Path, nodes: int) -> dict[str, float]:
    """Measure with the code of a checkout, in a process of its own."""
    own = folder / ".venv" / "bin" / "python"
    command = [str(own if own.exists() else sys.executable), str(COST), str(nodes)]
    environment = os.environ | {"PYTHONPATH": str(folder / "operator")}
    done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(nodes: int, folders: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a first plan and of a re-plan in each checkout; the fastest of runs in turns."""
    runs = in_turns({name: partial(_in_checkout, folder, nodes) for name, folder in folders.items()}, ROUNDS)
    return {name: {key: min(run[key] for run in many) for key in many[0]} for name, many in runs.items()}


def cells(nodes: int, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the cells of a row."""
    shown = [f"{nodes:,}"]
    for key in ("first", "again"):
        now, before = found["now"][key], found.get("before", {}).get(key)
        shown += [f"**{now:.2f} ms**", f"{before:.2f} ms" if before else "", f"{before / now:.1f}" if before else ""]
    return shown


def main() -> int:
    """Measure and print. The exit code is 0 if every aim for a re-plan is met, else 1."""
    parser = parser_of("tests.benchmarks.plan", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    own = Path(__file__).resolve().parents[2]
    folders = {"now": own} | ({"before": options.against.resolve()} if options.against else {})
    found = {nodes: measure(nodes, folders) for nodes in options.sizes}
    heading = ("nodes", "first plan", "before", "times", "re-plan", "before", "times")
    shown = table_of(heading, [cells(nodes, row) for nodes, row in found.items()], names=0)
    print_table(options, "plan", f"{shown}\n\nThe fastest of {ROUNDS} runs in turns, on {machine}.")
    return 1 if any(row["now"]["again"] > AIMS_MS.get(nodes, float("inf")) for nodes, row in found.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
