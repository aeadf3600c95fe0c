"""Public programs under ddprun, with two ranks on the CPU: the table in docs/reference/compatibility.md.

`make soak` runs it.

    python -m tests.compatibility --write

It installs the packages of tests/compatibility/requirements.txt into an environment of their own, fetches the scripts
from their public repositories, at fixed commits, and starts each program under torchrun, under ddprun, with an error in
rank 1, and with rank 1 stopped. Exit code 1: a cell is not "yes".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.report import describe_machine, write_section
from tests.compatibility.cells import row, table
from tests.compatibility.prepare import prepare
from tests.compatibility.programs import PROGRAMS, Program
from tests.compatibility.runs import Outcome, run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
_STEP = 3


def outcomes(program: Program) -> dict[str, Outcome]:
    """Run the program under both launchers, and under ddprun with a fault and with a hang."""
    found = {}
    for name, launcher, fault, flags in (
        ("torchrun", "torchrun", "", ()),
        ("ddprun", "ddprun", "", ()),
        ("fault", "ddprun", f"raise:{_STEP}", ()),
        ("hang", "ddprun", f"stop:{_STEP}", ("--hang-timeout", str(program.hang_timeout))),
    ):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
            found[name] = run(program, launcher, Path(folder), *flags, fault=fault)  # type: ignore[arg-type]
        outcome = found[name]
        said = f"exit code {outcome.code}, {len(outcome.losses)} losses, {time.monotonic() - begin:.0f} s"
        print(f"{program.name}: {name}: {said}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the programs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="WORD", help="the programs with this word in their names")
    parser.add_argument("--write", action="store_true", help="write the table of all into the page")
    options = parser.parse_args()
    prepare()
    chosen = [program for program in PROGRAMS if options.only.lower() in program.name.lower()]
    rows = {program.name: row(program, outcomes(program)) for program in chosen}
    print(table(rows))
    if options.write and len(rows) == len(PROGRAMS):
        write_section("programs", f"{table(rows)}\n\nOn {describe_machine(kubernetes=False)}.", PAGE)
    return 0 if all(cell.holds for cells in rows.values() for cell in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
