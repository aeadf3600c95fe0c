"""What a training's directory tells about it: the rows of all runs, which rows count, and why runs ended. No torch."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddprun.checkpoint_files import reading, run_folder
from ddprun.errors import DataMissing
from ddprun.launcher import node_reports
from ddprun.reporting.metrics import RecordedMetrics, read_metrics, whole

_LARGEST = 1e300  # what is not smaller cannot be drawn


@dataclass(frozen=True)
class StepRow:
    """One training step.

    ``loss``, ``learning_rate`` and ``speed`` (samples per second) are None if they are not finite or too large to draw.
    """

    run: int
    step: int
    loss: float | None
    learning_rate: float | None
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
        found = read_metrics(root)
    if not found.starts:
        raise DataMissing(
            f"no metrics of a training in {root}",
            hint="a training writes metrics/run-000001.jsonl into its --checkpoint-dir, else to a path that it prints",
            next_step="name that directory",
        )
    steps, lost, evaluations, stops = list[StepRow](), list[StepRow](), list[EvaluationRow](), dict[int, str]()
    for row in found.rows:
        run, step = row["run"], row["step"]
        if row["event"] == "train" and step:
            numbers = (_number(row.get(name)) for name in ("loss", "lr", "samplesPerSecond", "time"))
            (steps if found.counts(row) else lost).append(StepRow(run, step, *numbers))
        elif row["event"] == "stopped":
            stops[run] = str(row.get("message") or "stopped")
        elif found.counts(row) and (accuracy := _number(row.get("accuracy"))) is not None:
            evaluations.append(EvaluationRow(run, step, accuracy, _number(row.get("loss"))))
    for counted in (steps, evaluations):
        counted.sort(key=lambda row: row.step)
    newest = found.starts[max(found.starts)]
    runs = [_run(root, number, found, steps, lost) for number in sorted(found.starts)]
    runs = [replace(run, cause=stops.get(run.number, "")) for run in runs]
    total_steps, data = whole(newest.get("totalSteps")) or None, str(newest.get("data", ""))
    return History(_with_causes(runs, root), steps, lost, evaluations, total_steps, data)


def _run(root: Path, number: int, found: RecordedMetrics, steps: list[StepRow], lost: list[StepRow]) -> Run:
    start, origin = found.starts[number], found.origins[number]
    own = [step for step in (*steps, *lost) if step.run == number]
    times = [time for time in (_number(start.get("time")), *(step.time for step in own)) if time is not None]
    host, attempt, resumed = "", start.get("attempt"), origin[1] if origin else 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the folder of an old run may be gone
        owner = json.loads((run_folder(root, number) / "owner.json").read_bytes())
        host = str(owner.get("host") or "")
    return Run(
        number,
        "" if attempt is None else str(attempt),
        host,
        whole(start.get("worldSize")) or None,
        resumed,
        min(times, default=None),
        max(times, default=None),
        max((step.step for step in own), default=resumed),
        sum(step.run == number for step in lost),
    )


def _with_causes(runs: list[Run], root: Path) -> list[Run]:
    """Return the runs with what the launchers reported between the start of each and that of the next.

    If several attempts failed in that time, the first one was the run; the others never opened their metrics. A rank
    that is killed leaves no row of its last second, so the report's step counts as reached, too.
    """
    base = root / node_reports.FOLDER
    attempts = [nodes for path in base.iterdir() if (nodes := node_reports.read(path))] if base.is_dir() else []
    ended = [(max(float(node["time"]) for node in nodes), node_reports.merge_reports(nodes)[0]) for nodes in attempts]
    ended = sorted((pair for pair in ended if pair[1].get("phase") != "preflight"), key=lambda pair: pair[0])
    completed = []
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        end = following.began if following and following.began else math.inf
        report = next((report for time, report in ended if run.began and run.began <= time <= end), None)
        if report and not run.cause:  # else it was stopped
            reached = max(run.reached, (whole(report.get("step")) or 1) - 1)
            repeated = max(run.repeated, reached - following.resumed) if following else 0
            run = replace(run, cause=_cause(report), reached=reached, repeated=repeated)  # noqa: PLW2901
        completed.append(run)
    return completed


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


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None
