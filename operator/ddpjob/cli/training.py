"""What ``plot`` and ``report`` show: the history in the metrics of a job, and what its status adds."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpjob.api.status import DDPJobStatus
from ddpjob.api.text import attributed
from ddpjob.api.time_spent import TimeSpent
from ddpjob.api.times import parse_time
from ddpjob.cli.place import is_of_this_machine
from ddpjob.cli.pull import shown_transfer
from ddpjob.cli.text import one_line
from ddpjob.client.base import INTERRUPTED, Client, no_metrics
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, UnavailableError
from ddpplot import recorded
from ddpplot.history import History, Run, RunFailure
from ddpplot.job import JobRecord, with_failures

_LONGEST = 40  # characters of a state


@dataclass(frozen=True)
class Training:
    """A job, and the history of its training. time: the ledger until now."""

    found: DDPJob
    job: JobRecord
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
        history = without_metrics(found)
    return training_of(found, client.place, history)


def training_of(found: DDPJob, place: str, history: History) -> Training:
    """Return the training of a job with this history, as it is now. place: where the job runs, for a person."""
    now, spent = datetime.now(UTC), found.status.time
    if spent is not None and found.state != INTERRUPTED:
        spent = spent.at(now)
    job = _job(found, place, now, spent)
    return Training(found, job, with_failures(history, job), spent)


def without_metrics(found: DDPJob) -> History:
    """Return what the status alone says of the training: its current attempt."""
    return History(list(_attempt(found)), [], [], [], None, "")


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


def _job(found: DDPJob, place: str, now: datetime, time: TimeSpent | None) -> JobRecord:
    status = found.status
    created = found.manifest["metadata"].get("creationTimestamp")
    ended = status.completion_time or (time.as_of if time is not None and found.state == INTERRUPTED else None)
    return JobRecord(
        found.name,
        found.namespace or "",
        place,
        one_line(found.state[:_LONGEST]),
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


def _failures(status: DDPJobStatus) -> Iterator[RunFailure]:
    """Yield why the last attempts ended, and why lives of the current attempt ended, which goes on in the same pods."""
    for failure in status.failures or ():
        yield RunFailure(
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
                yield RunFailure(life.message, current.number, life.life, reason=life.reason)


def _seconds(time: str | None) -> float | None:
    return parse_time(time).timestamp() if time else None
