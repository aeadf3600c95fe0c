"""What a training's directory tells about it: the rows of all runs, which rows count, and why runs ended. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddptrain.checkpoint_files import reading, run_folder
from ddptrain.errors import DataMissing
from ddptrain.launcher import node_reports
from ddptrain.reporting.metrics import effective_rows, read_rows

_LARGEST = 1e300  # what is not smaller cannot be drawn


@dataclass(frozen=True)
class StepRow:
    """One training step.

    ``loss``, ``rate`` and ``speed`` (samples per second) are None if they are not finite or too large to draw.
    """

    run: int
    step: int
    loss: float | None
    rate: float | None
    speed: float | None
    time: float | None


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation on the test set."""

    run: int
    step: int
    accuracy: float
    loss: float | None


@dataclass(frozen=True)
class Run:
    """One start of the training.

    Attributes:
        resumed: the step from which it continued, 0 for none.
        began, ended: seconds since 1970 of its first and last row.
        reached: its last step; ``resumed`` if it recorded none.
        repeated: how many of its steps a later run computed again, because they came after its last checkpoint.
        cause: why it failed, if a launcher left a report; or what stopped it; else empty.
    """

    number: int
    attempt: str
    host: str
    world_size: int | None
    resumed: int
    began: float | None
    ended: float | None
    reached: int
    repeated: int = 0
    cause: str = ""


@dataclass(frozen=True)
class History:
    """A training over all its runs.

    Attributes:
        steps, evaluations: those that count, in order, as if there had been no interruption.
        lost: the steps that a later run computed again.
    """

    runs: list[Run]
    steps: list[StepRow]
    lost: list[StepRow]
    evaluations: list[EvaluationRow]
    total_steps: int | None
    data: str

    @property
    def restarts(self) -> list[Run]:
        """All runs but the first."""
        return self.runs[1:]

    @property
    def last_step(self) -> int:
        steps = [step.step for step in self.steps] + [evaluation.step for evaluation in self.evaluations]
        return max(steps, default=0)


def read_history(root: Path) -> History:
    """Return the history of the training in ``root``, which is a checkpoint directory or one run's metrics file.

    Raises:
        DataMissing: there are no metrics, or they cannot be read.
    """
    with reading(root):
        rows, counted = read_rows(root), effective_rows(root)
    starts = {number: row for row in rows if row.get("event") == "start" and (number := _whole(row.get("run")))}
    if not starts:
        raise DataMissing(
            f"no metrics of a training in {root}",
            hint="a training writes metrics/run-000001.jsonl into its --checkpoint-dir, else to a path that it prints",
            next_step="name that directory",
        )
    taken = [_step(row) for row in rows if row.get("event") == "train" and _whole(row.get("step"))]
    kept = {(row["run"], row["step"]) for row in counted if row["event"] == "train"}
    lost = [step for step in taken if (step.run, step.step) not in kept]
    newest = starts[max(starts)]
    stopped = [row for row in rows if row.get("event") == "stopped"]
    stops = {_whole(row.get("run")): str(row.get("message") or "stopped") for row in stopped}
    runs = [
        replace(_run(root, number, starts[number], taken, lost), cause=stops.get(number, ""))
        for number in sorted(starts)
    ]
    return History(
        _with_causes(runs, root),
        [_step(row) for row in counted if row["event"] == "train"],
        lost,
        [evaluated for row in counted if row["event"] == "eval" and (evaluated := _evaluated(row))],
        _whole(newest.get("totalSteps")) or None,
        str(newest.get("data", "")),
    )


def _run(root: Path, number: int, start: Mapping[str, Any], taken: Iterable[StepRow], lost: Iterable[StepRow]) -> Run:
    own = [step for step in taken if step.run == number]
    times = [time for time in (_number(start.get("time")), *(step.time for step in own)) if time is not None]
    origin = start.get("resumedFrom")
    resumed = _whole(origin.get("step")) if isinstance(origin, dict) else 0
    attempt = start.get("attempt")
    return Run(
        number,
        "" if attempt is None else str(attempt),
        _host(root, number),
        _whole(start.get("worldSize")) or None,
        resumed,
        min(times, default=None),
        max(times, default=None),
        max((step.step for step in own), default=resumed),
        sum(step.run == number for step in lost),
    )


def _host(root: Path, number: int) -> str:
    """Return the host of the run's rank 0; empty if its folder is gone."""
    try:
        owner = json.loads((run_folder(root, number) / "owner.json").read_bytes())
        return str(owner.get("host") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def _with_causes(runs: list[Run], root: Path) -> list[Run]:
    """Return the runs with what the launchers reported between the start of each and that of the next.

    If several attempts failed in that time, the first one was the run; the others never opened their metrics. A rank
    that is killed leaves no row of its last second, so the report's step counts as reached, too.
    """
    base = root / node_reports.FOLDER
    attempts = [nodes for path in base.iterdir() if (nodes := node_reports.read(path))] if base.is_dir() else []
    attempts.sort(key=_last_time)
    return [_with_cause(run, following, attempts) for run, following in zip(runs, [*runs[1:], None], strict=True)]


def _with_cause(run: Run, following: Run | None, attempts: Iterable[list[dict[str, Any]]]) -> Run:
    if run.cause:  # it was stopped
        return run
    end = following.began if following and following.began else math.inf
    for nodes in attempts:
        report, _ = node_reports.merge_reports(nodes)
        if run.began and run.began <= _last_time(nodes) <= end and "preflight" not in report:
            reached = max(run.reached, (_whole(report.get("step")) or 1) - 1)
            repeated = max(run.repeated, reached - following.resumed) if following else 0
            return replace(run, cause=_cause(report), reached=reached, repeated=repeated)
    return run


def _last_time(nodes: Iterable[Mapping[str, Any]]) -> float:
    return max(float(node["time"]) for node in nodes)


def _cause(report: Mapping[str, Any]) -> str:
    """Return rank, exception or signal, and step of a failure as text."""
    rank, step, exception = (report.get(name) for name in ("rank", "step", "exception"))
    message = str(report.get("message") or report.get("kind") or report.get("code"))
    if not message.startswith(f"rank {rank} "):
        if report.get("traceback") and exception and message != exception:  # not an error of the trainer's own
            message = f"{exception}: {message}"
        message = message if rank is None else f"rank {rank}: {message}"
    if not step or f"step {step}" in message:
        return message
    # The step of a killed rank is the one that had begun; the step of an exception is the last one that was completed.
    return f"{message}, {'in' if report.get('signal') else 'after'} step {step}"


def _step(row: Mapping[str, Any]) -> StepRow:
    numbers = (_number(row.get(name)) for name in ("loss", "lr", "samplesPerSecond", "time"))
    return StepRow(_whole(row.get("run")), _whole(row.get("step")), *numbers)


def _evaluated(row: Mapping[str, Any]) -> EvaluationRow | None:
    accuracy = _number(row.get("accuracy"))
    return None if accuracy is None else EvaluationRow(row["run"], row["step"], accuracy, _number(row.get("loss")))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _whole(value: Any) -> int:
    """Return the value if it is a whole number that can be drawn, else 0."""
    return value if isinstance(value, int) and abs(value) < _LARGEST else 0
