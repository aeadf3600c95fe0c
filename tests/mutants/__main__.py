"""``python -m tests.mutants``: put errors into a copy of the code, and see whether the tests detect them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant, areas
from tests.mutants.runner import Result, results_of

_WIDTH = 46
_TIMEOUT = 300.0
_COLUMNS = ("verdict", "by", "seconds", "cpu_seconds")


def main() -> int:
    """Run the command line. Return 0 if each mutant is killed, except those that are known to survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="areas (the names of the TOML files) or mutants; without any, all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there, after each mutant")
    parser.add_argument("--resume", action="store_true", help="skip the mutants whose results are in that file")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    chosen = _chosen(options.names, parser)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<{_WIDTH}} {mutant.file}: {mutant.breaks}")
        return 0
    rows: list[dict[str, Any]] = (
        json.loads(options.json.read_text()) if options.resume and options.json.exists() else []
    )
    known = {row["name"] for row in rows}
    results: list[Result] = []
    for result in results_of([mutant for mutant in chosen if mutant.name not in known], options.timeout):
        results.append(result)
        print(_line(result), flush=True)
        rows.append(asdict(result.mutant) | {name: getattr(result, name) for name in _COLUMNS})
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    _print_table(rows)
    return _summary(results)


def _chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> list[Mutant]:
    by_area = areas()
    by_name = {mutant.name: mutant for mutants in by_area.values() for mutant in mutants}
    if unknown := [name for name in names if name not in by_area and name not in by_name]:
        parser.error(f"no area and no mutant: {', '.join(unknown)}; areas are {', '.join(by_area)}")
    return [mutant for name in names or by_area for mutant in by_area.get(name) or [by_name[name]]]


def _line(result: Result) -> str:
    name, by = result.mutant.name, result.by or result.mutant.survives
    note = "" if result.is_expected else "NOT EXPECTED: "
    return f"{name:<{_WIDTH}} {result.verdict:<14} {result.cpu_seconds:>6.1f} s of CPU  {note}{by}"


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the numbers of each area, and of all."""
    of_area = {area: {mutant.name for mutant in mutants} for area, mutants in areas().items()}
    print(f"\n{'area':<12} {'mutants':>7} {'killed':>7} {'known to survive':>17} {'CPU seconds':>12}")
    for area, names in (of_area | {"all": set().union(*of_area.values())}).items():
        found = [row for row in rows if row["name"] in names]
        killed = sum(row["verdict"] == "killed" for row in found)
        known = sum(row["verdict"] == "survived" and bool(row["survives"]) for row in found)
        seconds = sum(row["cpu_seconds"] for row in found)
        if found:
            print(f"{area:<12} {len(found):>7} {killed:>7} {known:>17} {seconds:>12.0f}")


def _summary(results: Sequence[Result]) -> int:
    """Print what to do about each result that is not expected; return the exit code."""
    advice = {
        "killed": "is killed now: remove its line `survives`",
        "survived": "survives: the tests that claim it do not detect it",
        "not applicable": "cannot be applied: bring its text up to date",
        "error": "could not be run",
    }
    unexpected = [result for result in results if not result.is_expected]
    for result in unexpected:
        print(f"{result.mutant.name} {advice[result.verdict]}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
