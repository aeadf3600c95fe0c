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

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.report import describe_machine, write_section

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


def run(sizes: tuple[int, ...], against: Path | None) -> dict[str, Any]:
    """Measure all sizes, alternating between the checkouts."""
    folders = {"now": Path(__file__).resolve().parents[2], **({"before": against.resolve()} if against else {})}
    rows = []
    for nodes in sizes:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
        for _ in range(ROUNDS):
            for name, folder in folders.items():
                runs[name].append(_in_checkout(folder, nodes))
        best = {name: {key: min(run[key] for run in many) for key in many[0]} for name, many in runs.items()}
        rows.append({"nodes": nodes, **best})
    return {"benchmark": "plan", "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    lines = [
        "| nodes | first plan | before | times | re-plan | before | times |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = [f"{row['nodes']:,}"]
        for key in ("first", "again"):
            now, before = row["now"][key], row.get("before", {}).get(key)
            cells += [
                f"**{now:.2f} ms**",
                f"{before:.2f} ms" if before else "",
                f"{before / now:.1f}" if before else "",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"The fastest of {ROUNDS} runs in turns, on {result['machine']}."])


def main() -> int:
    """Measure and print. The exit code is 0 if every aim for a re-plan is met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    result = run(tuple(options.sizes), options.against) | {"machine": machine}
    print(json.dumps(result, indent=2) if options.json else table(result))
    if options.write:
        write_section("plan", table(result))
    slow = [row["nodes"] for row in result["rows"] if row["now"]["again"] > AIMS_MS.get(row["nodes"], float("inf"))]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
