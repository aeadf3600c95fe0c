"""What the runs of a program show: the cells of its row in docs/reference/compatibility.md. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.compatibility.inject import MESSAGE, RANK
from tests.compatibility.programs import PROGRAMS, Program
from tests.compatibility.runs import Outcome

COLUMNS = ("Runs", "Fault named", "Hang named", "Progress")
_STOPPED = 75
_ALARM = re.compile(r"(?m)^warning: ((?:slow|replicas diverged): .*)$")


@dataclass(frozen=True)
class Cell:
    """One answer: whether it holds, and what was seen."""

    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else '**no**'}: {self.seen}"


Row = dict[str, Cell]


def runs(program: Program, torchrun: Outcome, ddprun: Outcome) -> Cell:
    """Return whether both ran to the end with equal losses, and ddprun warned of no rank."""
    for name, outcome in (("torchrun", torchrun), ("ddprun", ddprun)):
        if not _succeeded(program, outcome, name):
            return Cell(False, f"{_ending(outcome)}{' under torchrun, too' if name == 'torchrun' else ''}")
        if len(outcome.losses) < program.count:
            return Cell(False, f"{len(outcome.losses)} of {program.count} losses under {name}")
    if alarms := _ALARM.findall(ddprun.output):
        return Cell(False, f"`{alarms[0]}`")
    # A program without an end prints more losses before it stops; the pattern finds the first ones of both ranks.
    equal = torchrun.losses == ddprun.losses
    return Cell(equal, f"{len(ddprun.losses)} losses {'equal' if equal else 'differ from'} torchrun's")


def fault_named(program: Program, outcome: Outcome) -> Cell:
    """Return whether the report names exception, message, rank and a line of the program."""
    report = outcome.report
    where = str(report.get("where"))
    # Where another process of the rank failed, the message has the exception, and the kind is what the rank raised.
    wanted = (f"ValueError: {MESSAGE}",) if report.get("kind") != "ValueError" else (MESSAGE,)
    right = report.get("message") in wanted and report.get("rank") == RANK
    return Cell(right and where.startswith(f"{program.source.file}:"), _place(report))


def hang_named(outcome: Outcome) -> Cell:
    """Return whether the report names the rank that was stopped."""
    report = outcome.report
    if outcome.code is None:
        return Cell(False, "nothing is reported")
    return Cell(report.get("kind") == "Hang" and report.get("rank") == RANK, _place(report))


def progress(program: Program, outcome: Outcome) -> Cell:
    """Return whether GET /progress showed steps, and the last report the number of steps that the program made."""
    last = (outcome.report.get("progress") or outcome.report).get("step") or 0
    if not (outcome.shown or last):
        return Cell(False, "no step is shown")
    if program.endless:
        return Cell(outcome.shown > 0, f"step {outcome.shown} was shown before it was stopped")
    return Cell(last == program.steps, f"{last} of {program.steps} steps")


def row(program: Program, outcomes: Mapping[str, Outcome]) -> Row:
    """Return the cells by column, from the outcomes of torchrun, ddprun, fault and hang."""
    return {
        "Runs": runs(program, outcomes["torchrun"], outcomes["ddprun"]),
        "Fault named": fault_named(program, outcomes["fault"]),
        "Hang named": hang_named(outcomes["hang"]),
        "Progress": progress(program, outcomes["ddprun"]),
    }


def table(rows: Mapping[str, Row]) -> str:
    """Return the table of the programs as Markdown, and below it what a reader must know of a row."""
    lines = [f"| Program | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join(str(cells[column]) for column in COLUMNS)} |")
    lines += ["", *(f"- {program.name}: {program.remark}" for program in PROGRAMS if program.remark)]
    return "\n".join(lines)


def _succeeded(program: Program, outcome: Outcome, launcher: str) -> bool:
    if program.endless:  # stopped by SIGTERM
        return outcome.code == _STOPPED if launcher == "ddprun" else outcome.code is not None
    return outcome.code == 0


def _ending(outcome: Outcome) -> str:
    if outcome.code is None:
        return "it does not end"
    errors = re.findall(r"(?m)^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)$", outcome.output)
    message = str(outcome.report.get("message") or next(iter(errors), ""))
    return f"`{message.partition('. ')[0]}`" if message else f"exit code {outcome.code}"


def _place(report: Mapping[str, object]) -> str:
    if not report:
        return "no report"
    where = f", {report['where']}" if report.get("where") else ""
    kind = report.get("kind") or report.get("outcome")
    return f"`{kind}` of rank {report.get('rank')}, step {report.get('step')}{where}"
