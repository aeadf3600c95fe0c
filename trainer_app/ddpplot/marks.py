"""What happened in a training, by step: starts, restarts in place, failures, stops and saves. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpplot.history import History, Run, StepRow, loss_text

Kind = Literal["restart", "inPlace", "failure", "stop", "save", "notFinite"]
_ORDER = {"restart": 0, "inPlace": 0, "failure": 2, "stop": 2}  # within a run


@dataclass(frozen=True)
class Mark:
    """One event.

    Attributes:
        kind: ``restart`` is a new attempt, ``inPlace`` a restart in the same pods; ``stop`` was asked for;
            ``notFinite`` is the first loss of a run that is NaN or infinite.
        step: of a start the step from which it continued, else the last step before the event.
        label: in a few characters; text: as a sentence.
    """

    kind: Kind
    step: int
    run: int
    label: str
    text: str


def name_of(run: Run) -> str:
    """Return how a person calls the run: by its attempt, and by its life if the attempt has several."""
    if not run.attempt:
        return f"run {run.number}"
    of_several = run.is_in_place or (run.failure is not None and run.failure.life is not None)
    return f"attempt {run.attempt}" + (f", life {run.life}" if of_several else "")


def marks(history: History) -> list[Mark]:
    """Return the marks in the order in which they happened."""
    found = [Mark("save", save.step, save.run, "saved", _saved(save.seconds)) for save in history.saves]
    for number, run in enumerate(history.runs):
        if number:
            found.append(_start(run, f"restart {number}" if len(history.runs) > 2 else "restart"))
        if run.cause:
            kind: Kind = "failure" if run.failure else "stop"
            text = f"{name_of(run)} {'failed' if run.failure else 'ended'}: {run.cause}"
            found.append(Mark(kind, run.reached, run.number, "failed" if run.failure else "stopped", text))
    found += _not_finite(history)
    return sorted(found, key=lambda mark: (mark.run, _ORDER.get(mark.kind, 1), mark.step))


def _not_finite(history: History) -> Iterator[Mark]:
    by_run: dict[int, list[StepRow]] = {}
    for step in (*history.lost, *history.steps):
        if step.loss is not None and not math.isfinite(step.loss):
            by_run.setdefault(step.run, []).append(step)
    for run in history.runs:
        if steps := by_run.get(run.number):
            first = min(steps, key=lambda step: step.step)
            others = f" and {len(steps) - 1:,} later" if len(steps) > 1 else ""
            label, at = loss_text(first.loss or 0.0), f"at step {first.step:,}{others}"
            yield Mark("notFinite", first.step, run.number, label, f"{name_of(run)}: the loss is {label} {at}")


def _start(run: Run, label: str) -> Mark:
    if run.is_in_place:
        label = f"life {run.life}"
    elif run.attempt:
        label = f"attempt {run.attempt}"
    place = f"resumed from step {run.resumed:,}" if run.resumed else "began at step 0"
    kind: Kind = "inPlace" if run.is_in_place else "restart"
    text = f"{name_of(run)} {place}" + (" in place" if run.is_in_place else "")
    return Mark(kind, run.resumed, run.number, label, text)


def _saved(seconds: float | None) -> str:
    return "saved" if seconds is None else f"saved in {seconds:.3g} s"
