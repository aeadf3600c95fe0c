"""Apply mutants one after the other, and find out which of them the tests that claim to detect them do detect."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.mutant import Mutant, NotApplicableError
from tests.mutants.tree import TIMED_OUT, Tree

Verdict = Literal["killed", "survived", "not applicable", "error"]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_SOME_FAILED = 1  # exit code of pytest; those above are about the run itself
_LAST_LINES = 15


@dataclass(frozen=True)
class Result:
    """What became of a mutant. by: the test or the run that detected it, or why the mutant could not be run."""

    mutant: Mutant
    verdict: Verdict
    by: str
    seconds: float


def results_of(mutants: Sequence[Mutant], timeout: float) -> Iterator[Result]:
    """Yield the result of each mutant, those of the simulator last.

    timeout: seconds for the tests of one mutant; a mutant whose tests take longer is killed.
    """
    if of_tests := [mutant for mutant in mutants if not mutant.runs]:
        with tempfile.TemporaryDirectory(prefix="ddpjob-mutants-") as folder:
            tests = _Tests(Tree(Path(folder)), timeout)
            yield from (_timed(mutant, tests.verdict) for mutant in of_tests)
    if of_runs := [mutant for mutant in mutants if mutant.runs]:
        yield from _simulated(of_runs)


def _timed(mutant: Mutant, find: Callable[[Mutant], tuple[Verdict, str]]) -> Result:
    began = time.monotonic()
    try:
        verdict, by = find(mutant)
    except NotApplicableError as error:
        verdict, by = "not applicable", str(error)
    return Result(mutant, verdict, by, round(time.monotonic() - began, 1))


class _Tests:
    """Runs tests in a copy of the repository."""

    def __init__(self, tree: Tree, timeout: float) -> None:
        self._tree, self._timeout = tree, timeout
        self._sound: dict[tuple[str, ...], str] = {}

    def verdict(self, mutant: Mutant) -> tuple[Verdict, str]:
        with self._tree.changed(mutant):
            code, output = self._tree.pytest(mutant.tests, self._timeout)
        if code == 0:
            return "survived", ""
        failed = _FAILED.search(output)
        has_aborted = code < 0 and failed is not None  # after the report: a thread was left behind, for example
        if code not in (_SOME_FAILED, TIMED_OUT) and not has_aborted:
            return "error", _end_of(output)
        if trouble := self._trouble_without(mutant.tests):
            return "error", f"without the mutant, too: {trouble}"
        return "killed", "time limit" if code == TIMED_OUT else failed[1] if failed else _end_of(output)

    def _trouble_without(self, tests: tuple[str, ...]) -> str:
        """Return how the tests fail without a mutant; empty if they pass."""
        if tests not in self._sound:
            code, output = self._tree.pytest(tests, self._timeout)
            self._sound[tests] = _end_of(output) if code else ""
        return self._sound[tests]


def _end_of(output: str) -> str:
    return "\n".join(output.splitlines()[-_LAST_LINES:])


def _simulated(mutants: Sequence[Mutant]) -> Iterator[Result]:
    from tests.simulator.parallel import pool  # noqa: PLC0415 - slow, and rarely needed

    with pool() as processes:
        yield from (_timed(mutant, lambda each: processes.submit(_detected, each).result()) for mutant in mutants)


def _detected(mutant: Mutant) -> tuple[Verdict, str]:
    """Return the verdict, and the run that detects the mutant."""
    from tests.simulator.parallel import first_detection  # noqa: PLC0415 - imported by the processes of the pool only

    found = first_detection(mutant) or ""
    return "killed" if found else "survived", found.rpartition("\n")[2].strip()
