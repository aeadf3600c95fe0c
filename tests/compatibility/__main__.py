"""Public programs under ddprun, with two ranks on the CPU: the table in docs/reference/compatibility.md.

`make soak` runs it.

    python -m tests.compatibility prepare
    python -m tests.compatibility run --write

``prepare`` installs the packages of tests/compatibility/requirements.txt into an environment of their own and fetches
the scripts from their public repositories, at fixed commits. ``run`` starts each program under torchrun, under ddprun,
with an error in rank 1, and with rank 1 stopped. Exit code 1: a cell that is "yes" in the document is not "yes" any
more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.report import describe_machine, write_section
from tests.compatibility import prepare
from tests.compatibility.cells import Row, parsed, row, table, worse
from tests.compatibility.prepare import Prepared
from tests.compatibility.programs import PROGRAMS, Program
from tests.compatibility.runs import Outcome, run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
SECTION = "programs"
_STEP = 3


def outcomes(program: Program, prepared: Prepared, limit: float) -> dict[str, Outcome]:
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
            found[name] = run(program, prepared, launcher, Path(folder), *flags, fault=fault, limit=limit)  # type: ignore[arg-type]
        outcome = found[name]
        said = f"exit code {outcome.code}, {len(outcome.losses)} losses, {time.monotonic() - begin:.0f} s"
        print(f"{program.name}: {name}: {said}", file=sys.stderr, flush=True)
    return found


def section(rows: Mapping[str, Row]) -> str:
    """Return the text between the markers of the document."""
    return f"{table(rows)}\n\nOn {describe_machine(kubernetes=False)}."


def documented() -> str:
    """Return what the document has between the markers."""
    _, _, rest = PAGE.read_text().partition(f"<!-- {SECTION}:begin -->")
    return rest.partition(f"<!-- {SECTION}:end -->")[0]


def main() -> int:
    """Prepare, or run the programs and print the table."""
    options = _parser().parse_args()
    if options.command == "prepare":
        prepare.prepare(options.cache, options.git)
        return 0
    chosen = [program for program in PROGRAMS if options.only.lower() in program.name.lower()]
    prepared = prepare.installed(options.cache)
    before, rows = parsed(documented()), {}
    for program in chosen:
        found = outcomes(program, prepared, options.limit)
        rows[program.name] = row(program, found)
    regressions = worse(before, rows)
    print(table(rows))
    if options.write:
        merged = {name: before.get(name, {}) | rows.get(name, {}) for name in before | rows}
        write_section(SECTION, section(merged), PAGE)
    for line in regressions:
        print(f"error: no longer so: {line}", file=sys.stderr)
    return 1 if regressions else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("prepare", "run"))
    parser.add_argument("--cache", type=Path, default=prepare.CACHE, help="where it is prepared (default: %(default)s)")
    parser.add_argument("--git", default=prepare.GIT, help="where the repositories are (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="the programs with this word in their names")
    parser.add_argument(
        "--limit", type=float, default=600, metavar="S", help="seconds for one run (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/compatibility.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
