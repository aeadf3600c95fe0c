"""``python -m tests.mutants``: put errors into a copy of the code, and see whether the tests detect them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mutants.mutant import Mutant, areas
from tests.mutants.runner import Result, results_of

_WIDTH = 46
_TIMEOUT = 300.0


def main() -> int:
    """Run the command line. Return 0 if each mutant is killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="areas (the names of the TOML files) or mutants; without any, all")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    chosen = _chosen(options.names, parser)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<{_WIDTH}} {mutant.file}: {mutant.breaks}")
        return 0
    results: list[Result] = []
    for result in results_of(chosen, options.timeout):
        results.append(result)
        print(_line(result), flush=True)
    return _summary(results)


def _chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> list[Mutant]:
    by_area = areas()
    by_name = {mutant.name: mutant for mutants in by_area.values() for mutant in mutants}
    if unknown := [name for name in names if name not in by_area and name not in by_name]:
        parser.error(f"no area and no mutant: {', '.join(unknown)}; areas are {', '.join(by_area)}")
    return [mutant for name in names or by_area for mutant in by_area.get(name) or [by_name[name]]]


def _line(result: Result) -> str:
    return f"{result.mutant.name:<{_WIDTH}} {result.verdict:<14} {result.seconds:>6.1f} s  {result.by}"


def _summary(results: Sequence[Result]) -> int:
    """Print the numbers, and what to do about each mutant that is not killed; return the exit code."""
    advice = {
        "survived": "survives: the tests that claim it do not detect it",
        "not applicable": "cannot be applied: bring its text up to date",
        "error": "could not be run",
    }
    others = [result for result in results if result.verdict != "killed"]
    print(f"\n{len(results) - len(others)} of {len(results)} are killed")
    for result in others:
        print(f"{result.mutant.name} {advice[result.verdict]}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
