"""The result of a test run: read from pytest's JUnit XML, and printed as a table."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

REASON_CHARACTERS = 200
"""So much of an error is shown beside the name of its test; pytest has printed all of it before."""


class Outcome(StrEnum):
    """How a test or a layer ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Case:
    """One test. ``seconds`` include its set-up and tear-down."""

    name: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    """Why it was skipped, or the first line of its error."""
    first_error: str | None = None
    """Of a test that passed when it ran a second time: the first line of the error before."""


@dataclass(frozen=True)
class CommandResult:
    """One finished command of a layer. ``cpu_seconds``: of its process, and of descendants that a parent waited for."""

    seconds: float
    tests: tuple[Case, ...]
    cpu_seconds: float = 0.0
    problem: str = ""
    """Why the command failed, apart from failed tests; empty otherwise."""
    missing: str = ""
    """Why something that it needs could not be prepared; empty otherwise."""

    @property
    def has_failed(self) -> bool:
        """Whether a test of it failed."""
        return any(test.outcome is Outcome.FAILED for test in self.tests)

    def followed_by(self, again: CommandResult) -> CommandResult:
        """Return this result after its failed tests ran again. One that passed then has ``first_error``."""
        passed = {test.name for test in again.tests if test.outcome is Outcome.PASSED}
        tests = tuple(
            replace(test, outcome=Outcome.PASSED, reason="", first_error=test.reason)
            if test.outcome is Outcome.FAILED and test.name in passed and not again.problem
            else test
            for test in self.tests
        )
        seconds, cpu_seconds = self.seconds + again.seconds, self.cpu_seconds + again.cpu_seconds
        return replace(self, seconds=seconds, tests=tests, cpu_seconds=cpu_seconds)


@dataclass
class LayerResult:
    """All commands of one layer."""

    layer: str
    commands: list[CommandResult] = field(default_factory=list)

    @property
    def tests(self) -> list[Case]:
        return [test for command in self.commands for test in command.tests]

    @property
    def seconds(self) -> float:
        return sum(command.seconds for command in self.commands)

    @property
    def cpu_seconds(self) -> float:
        return sum(command.cpu_seconds for command in self.commands)

    @property
    def problems(self) -> list[str]:
        return [command.problem for command in self.commands if command.problem]

    def count(self, outcome: Outcome) -> int:
        return sum(test.outcome is outcome for test in self.tests)

    @property
    def skip_reason(self) -> str:
        """Why its tests were skipped: what could not be prepared, else the most frequent reason of the tests."""
        missing = [command.missing for command in self.commands if command.missing]
        reasons = Counter(test.reason for test in self.tests if test.outcome is Outcome.SKIPPED)
        return missing[0] if missing else reasons.most_common(1)[0][0] if reasons else ""

    def outcome(self, *, ci: bool) -> Outcome:
        """Return how the layer ended. With ``ci`` a skipped test fails it."""
        skipped = self.count(Outcome.SKIPPED)
        if self.problems or self.count(Outcome.FAILED) or (ci and skipped):
            return Outcome.FAILED
        return Outcome.SKIPPED if skipped and not self.count(Outcome.PASSED) else Outcome.PASSED

    def explanation(self, *, ci: bool) -> str:
        """Return the last column of the table."""
        outcome, skipped = self.outcome(ci=ci), self.count(Outcome.SKIPPED)
        if outcome is Outcome.SKIPPED:
            return f"skipped ({skipped}): {self.skip_reason}"
        if outcome is Outcome.PASSED:
            return "ok"
        causes = list(self.problems)
        if ci and skipped:
            causes.append(f"CI=true forbids skipped tests ({skipped}): {self.skip_reason}")
        return ": ".join(["FAILED", *causes[:1]])


def read_junit(path: Path) -> list[Case]:
    """Return the tests of a JUnit XML file. A test with an error in set-up or tear-down is a failed test."""
    found: dict[str, Case] = {}
    root = ET.parse(path).getroot()  # noqa: S314 - written by our own pytest
    for case in root.iter("testcase"):
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        outcome, reason = _outcome(case)
        test = Case(name, outcome, float(case.get("time") or 0), reason)
        # pytest writes a second entry for a test whose tear-down fails after its call failed or passed.
        if name in found and found[name].outcome is Outcome.FAILED:
            continue
        found[name] = test
    return list(found.values())


def _outcome(case: ET.Element) -> tuple[Outcome, str]:
    for error in (case.find("failure"), case.find("error")):
        if error is not None:
            return Outcome.FAILED, next(iter((error.get("message") or "").splitlines()), "")
    skipped = case.find("skipped")
    # An expected failure (xfail) is reported as skipped too, with another type.
    if skipped is not None and skipped.get("type") == "pytest.skip":
        return Outcome.SKIPPED, skipped.get("message") or ""
    return Outcome.PASSED, ""


def totals(results: Sequence[LayerResult], *, ci: bool) -> dict[Outcome, int]:
    """Return the number of tests per outcome. A layer that failed without a failed test counts as one failed test."""
    counts = {outcome: sum(result.count(outcome) for result in results) for outcome in Outcome}
    for result in results:
        if result.outcome(ci=ci) is Outcome.FAILED and not result.count(Outcome.FAILED):
            counts[Outcome.FAILED] += 1
    return counts


def as_text(results: Sequence[LayerResult], seconds: float, *, ci: bool) -> str:
    """Return the closing report: skip reasons, the table, failed tests and the totals.

    The failed tests are near the end, because some services that run tests show only the end of the output.
    """
    lines = [*_partly_skipped(results, ci=ci)]
    lines += ["", f"{'layer':<12} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8} {'cpu':>8}  result"]
    for result in results:
        passed, failed, skipped = (result.count(outcome) for outcome in Outcome)
        explanation = result.explanation(ci=ci)
        times = f"{result.seconds:>8.1f} {result.cpu_seconds:>8.1f}"
        lines.append(f"{result.layer:<12} {passed:>7} {failed:>7} {skipped:>8} {times}  {explanation}")
    lines += [*_passed_later(results), *_failed(results)]
    layers = Counter(result.outcome(ci=ci) for result in results)
    lines.append("layers: " + ", ".join(f"{layers[outcome]} {outcome}" for outcome in Outcome))
    lines[-1] += f" in {seconds:.0f} s, {sum(result.cpu_seconds for result in results):.0f} s of CPU time"
    counts = totals(results, ci=ci)
    lines.append(", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome))
    return "\n".join(lines)


def _failed(results: Sequence[LayerResult]) -> list[str]:
    rows = [
        _with_error(result.layer, test.name, test.reason)
        for result in results
        for test in result.tests
        if test.outcome is Outcome.FAILED
    ]
    return ["failed tests:", *rows] if rows else []


def _passed_later(results: Sequence[LayerResult]) -> list[str]:
    rows = [
        _with_error(result.layer, test.name, test.first_error)
        for result in results
        for test in result.tests
        if test.first_error is not None
    ]
    return (
        ["failed first and passed when they ran again (each is a defect of the test or of the code):", *rows]
        if rows
        else []
    )


def _with_error(layer: str, name: str, error: str) -> str:
    return f"  {layer:<12} {name}" + (f"\n    {error[:REASON_CHARACTERS]}" if error else "")


def _partly_skipped(results: Sequence[LayerResult], *, ci: bool) -> list[str]:
    """Return why tests were skipped in layers that the table does not show as skipped."""
    lines = []
    for result in results:
        if result.outcome(ci=ci) is not Outcome.SKIPPED:
            reasons = Counter(test.reason for test in result.tests if test.outcome is Outcome.SKIPPED)
            lines += [f"  {result.layer:<12} {count}: {reason}" for reason, count in reasons.most_common()]
    return ["", "skipped tests:", *lines] if lines else []
