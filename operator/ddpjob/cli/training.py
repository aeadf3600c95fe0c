"""What ``plot`` and ``report`` show: the history in the metrics of a job, and what its status adds; also as JSON."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from ddpjob.api.model import WireModel
from ddpjob.api.status import DDPJobStatus, TimeSpent
from ddpjob.api.text import attributed
from ddpjob.api.times import parse_time
from ddpjob.cli.place import is_of_this_machine
from ddpjob.cli.text import one_line
from ddpjob.cli.transfer import shown_transfer
from ddpjob.client.base import INTERRUPTED, Client, no_metrics
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, UnavailableError
from ddpplot import recorded
from ddpplot.history import Failure, History, Run
from ddpplot.job import Job, with_failures
from ddpplot.marks import marks


@dataclass(frozen=True)
class Training:
    """A job, and the history of its training. time: the ledger until now."""

    found: DDPJob
    job: Job
    history: History
    time: TimeSpent | None


def read_training(client: Client, name: str, metrics: str | None, *, is_needed: bool = True) -> Training:
    """Return the training of a job.

    Args:
        is_needed: the metrics are needed; else, if none was named that cannot be read, the attempts alone are returned.

    Raises:
        DDPJobError: its metrics cannot be read, or there are none.
        JobNotFoundError: there is no such job.
    """
    found = client.get(name)
    try:
        history = _history(client, found, metrics)
    except DDPJobError as error:
        if is_needed or metrics is not None:
            raise
        print(f"note: without curves: {one_line(error.error)}", file=sys.stderr)
        history = History(list(_attempt(found)), [], [], [], None, "")
    now, spent = datetime.now(UTC), found.status.time
    if spent is not None and found.state != INTERRUPTED:
        spent = spent.at(now)
    job = _job(found, client.place, now, spent)
    return Training(found, job, with_failures(history, job), spent)


def _history(client: Client, found: DDPJob, metrics: str | None) -> History:
    with ExitStack() as opened:
        if metrics is not None:
            directory = Path(metrics).expanduser()
        elif is_of_this_machine(client):
            directory = client.metrics(found)
        else:
            if found.manifest["spec"].get("checkpoint") is None:
                raise no_metrics(found)
            directory = Path(opened.enter_context(TemporaryDirectory(prefix="ddpjob-")))
            show = opened.enter_context(shown_transfer(quiet=not sys.stderr.isatty()))
            client.pull(found, directory, metrics=True, on_progress=show)
        try:
            return recorded.read_history(directory)
        except recorded.DataMissing as error:
            raise UnavailableError(str(error), error.hint, _elsewhere(found, metrics)) from error


def _attempt(found: DDPJob) -> Iterator[Run]:
    """Yield the current attempt as a run; the status has the failures of those before it."""
    status, current = found.status, found.status.current_attempt
    if current is not None and current.number:
        began, ended = _seconds(current.start_time), _seconds(status.completion_time) or time.time()
        world, reached = status.world, status.progress.step if status.progress else None
        size = world.world_size if world else None
        yield Run(current.number, str(current.number), "", size, 0, began, ended, reached or 0)


def _elsewhere(found: DDPJob, metrics: str | None) -> str:
    if metrics is not None:
        return "name the directory that holds the folder metrics, or this folder"
    if found.finished:
        return "let the script call ddprun.report(step=…, loss=…), and run it again; --metrics DIR names other metrics"
    return f"ddpjob logs {found.name} shows how far it is; --metrics DIR names another directory"


def _job(found: DDPJob, place: str, now: datetime, time: TimeSpent | None) -> Job:
    status = found.status
    created = found.manifest["metadata"].get("creationTimestamp")
    ended = status.completion_time or (time.as_of if time is not None and found.state == INTERRUPTED else None)
    return Job(
        found.name,
        found.namespace or "",
        place,
        found.state,
        began=_seconds(created),
        ended=_seconds(ended) if ended else now.timestamp(),
        is_finished=found.finished,
        nodes=status.world.num_nodes if status.world else None,
        restarts=status.restarts or 0,
        in_place=status.restarts_in_place or 0,
        failures=list(_failures(status)),
        time=time.by_category if time is not None and time.total else {},
        goodput=time.goodput if time is not None else None,
    )


def _failures(status: DDPJobStatus) -> Iterator[Failure]:
    """Yield why the last attempts ended, and why lives of the current attempt ended, which goes on in the same pods."""
    for failure in status.failures or ():
        yield Failure(
            failure.message,
            failure.attempt,
            reason=failure.reason,
            hint=attributed("hint", failure.hint or "", failure.from_program),
            next_step=attributed("next", failure.next or "", failure.from_program),
            # Of a rank that was killed, it may be the step that had begun.
            step=failure.step - (failure.signal is not None) if failure.step else None,
            time=_seconds(failure.time),
        )
    current = status.current_attempt
    if current is not None and current.in_place is not None:
        for life in current.in_place.failures or ():
            if life.life < (current.in_place.life or 1):
                yield Failure(life.message, current.number, life.life, reason=life.reason)


def _seconds(time: str | None) -> float | None:
    return parse_time(time).timestamp() if time else None


class PlottedRun(WireModel):
    """One start of the training: an attempt, or a life of an attempt after a restart in place."""

    run: int
    """Number of the run, which its rows have, too."""
    attempt: str | None = None
    """The attempt, from the environment of the trainer."""
    life: int | None = None
    """Number of the start within the attempt, from 1."""
    in_place: bool
    """Whether it is a restart in place of the run before it."""
    world_size: int | None = None
    resumed_from_step: int
    """Step of the checkpoint from which it continued; 0 for none."""
    reached_step: int
    repeated_steps: int
    """Steps that a later run computed again."""
    began: float | None = None
    """Time of its first row, in seconds since 1970."""
    ended: float | None = None
    """Time of its last row."""
    cause: str | None = None
    """Why it ended, if it failed or was stopped."""
    reason: str | None = None
    """Reason of the failure in one CamelCase word (docs/reference/failures.md)."""
    hint: str | None = None
    next: str | None = None


class PlottedMark(WireModel):
    """One event, in the order in which they happened."""

    kind: Literal["restart", "inPlace", "failure", "stop", "save", "notFinite"]
    """restart: a new attempt, or a new start without an operator. inPlace: a restart in the same pods. notFinite: the
    first loss of a run that is NaN or infinite."""
    step: int
    """Of a start the step from which it continued, else the last step before the event."""
    run: int
    text: str


class PlottedStep(WireModel):
    """One row of a training step."""

    run: int
    step: int
    loss: float | Literal["NaN", "Infinity", "-Infinity"] | None = None
    """Training loss; a text if it is no finite number, which JSON does not have."""
    learning_rate: float | None = None
    samples_per_second: float | None = None
    time: float | None = None
    """In seconds since 1970."""


class PlottedEvaluation(WireModel):
    """One evaluation on the test set."""

    run: int
    step: int
    accuracy: float
    """From 0 to 1."""
    loss: float | None = None


class Plot(WireModel):
    """The output of `ddpjob plot -o json`: a training as if it had never been interrupted, and what happened."""

    job: str
    namespace: str | None = None
    place: str
    """Where the job is: this machine, or cluster and namespace."""
    state: str
    step: int
    """The last step in the metrics."""
    total_steps: int | None = None
    throughput: float | None = None
    """Median of the throughput, in throughputUnit per second."""
    throughput_unit: Literal["samples", "steps"]
    """samples if the program reports samples per second, else steps, from the times of its rows."""
    runs: list[PlottedRun]
    marks: list[PlottedMark]
    steps: list[PlottedStep]
    repeated: list[PlottedStep]
    """Steps of a run that a later run computed again."""
    evaluations: list[PlottedEvaluation]
    time: TimeSpent | None = None
    """As `status.time`, until now."""
    goodput: float | None = None
    """training / (all - queued - stopped)."""


def plot_of(training: Training) -> Plot:
    """Return the training as JSON has it."""
    history, speed, time = training.history, training.history.throughput, training.time
    return Plot(
        job=training.job.name,
        namespace=training.found.namespace,
        place=training.job.place,
        state=training.job.state,
        step=history.last_step,
        total_steps=history.total_steps,
        throughput=speed.median,
        throughput_unit="samples" if speed.unit == "samples" else "steps",
        runs=[_run(history, at) for at in range(len(history.runs))],
        marks=[PlottedMark(kind=m.kind, step=m.step, run=m.run, text=m.text) for m in marks(history)],
        steps=list(_steps(history, lost=False)),
        repeated=list(_steps(history, lost=True)),
        evaluations=[
            PlottedEvaluation(run=row.run, step=row.step, accuracy=row.accuracy, loss=row.loss)
            for row in history.evaluations
        ],
        time=time,
        goodput=time.goodput if time is not None else None,
    )


def _run(history: History, at: int) -> PlottedRun:
    run = history.runs[at]
    return PlottedRun(
        run=run.number,
        attempt=run.attempt or None,
        life=run.life,
        in_place=run.is_in_place,
        world_size=run.world_size,
        resumed_from_step=run.resumed,
        reached_step=run.reached,
        repeated_steps=run.repeated,
        began=run.began,
        ended=run.ended,
        cause=run.cause or None,
        reason=(run.failure.reason if run.failure else "") or None,
        hint=(run.failure.hint if run.failure else "") or None,
        next=(run.failure.next_step if run.failure else "") or None,
    )


def _steps(history: History, *, lost: bool) -> Iterator[PlottedStep]:
    for row in history.lost if lost else history.steps:
        yield PlottedStep(
            run=row.run,
            step=row.step,
            loss=row.loss if row.loss is None or math.isfinite(row.loss) else json.dumps(row.loss),  # type: ignore[arg-type]
            learning_rate=row.learning_rate,
            samples_per_second=row.speed,
            time=row.time,
        )
