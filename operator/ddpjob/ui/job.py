"""One job as its page shows it: one thread reads it for all viewers of the page, as long as there are any."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ddpjob.api.times import parse_time
from ddpjob.cli.page import events_of, not_read, page_of, read_log, verdict_of
from ddpjob.cli.place import is_of_this_machine
from ddpjob.cli.training import Training, training_of, without_metrics
from ddpjob.client.base import Client
from ddpjob.client.job import DDPJob
from ddpjob.client.ranks import RankTable
from ddpjob.errors import DDPJobError, JobNotFoundError, StoppedError
from ddpjob.ui.jobs import WatchedJobs
from ddpjob.ui.strip import Strip
from ddpplot import recorded
from ddpplot.history import History, RunFailure, StepRow, drawable
from ddpplot.page import PageEvent, TrainingPage, Verdict, curves_of

T = TypeVar("T")
LOOK_SECONDS = 2.0  # between two looks
_VERDICT, _EVENTS, _LOG = 10.0, 20.0, 4.0  # seconds between two readings, unless the status has changed
_LEFT = 15.0  # seconds without a viewer until the reading ends
_SHARE = 0.05  # of the time that the reading of metrics may take
_LONGEST = 1000  # characters of an error
_MOST_ROWS = 4000  # that are kept of the progress in the status; of more, every second is left out


class LiveJob:
    """What is known of one job. Its thread reads while ``seen`` is called now and then.

    Attributes:
        version: grows when something has changed.
        page, curves: None, and none, before the first look.
        ranks: None if no launcher answers.
        trouble: why the page is not current.
    """

    def __init__(self, client: Client, jobs: WatchedJobs, namespace: str, name: str) -> None:
        self._client, self._jobs, self._key = client, jobs, (namespace, name)
        self.version = 0
        self._viewed, self._thread, self._lock = 0.0, None, threading.Lock()
        self._ready = threading.Event()
        self._begin()

    def _begin(self) -> None:
        """Know nothing, as of a job that has taken the name of another."""
        self.strip = Strip()
        self.page: TrainingPage | None = None
        self.ranks: RankTable | None = None
        self.job: DDPJob | None = None
        self.trouble: DDPJobError | None = None
        self._verdict: Verdict | None = None
        self._events: Sequence[PageEvent] = ()
        self._log: tuple[str, Sequence[str]] = "", ()
        self.curves: Sequence[str] = ()
        self._history: History | None = None
        self._source: tuple[History | None, Sequence[RunFailure], History] = None, (), History([], [], [], [], None, "")
        self._rows = list[StepRow]()
        self._read: dict[str, float] = {}  # when each part is read again

    _thread: threading.Thread | None

    def seen(self) -> None:
        """Take note of a viewer, and start the thread that reads unless it runs."""
        self._viewed = time.monotonic()
        with self._lock:
            if self._thread is None:
                self._ready.clear()  # what was seen last is old
                self._thread = threading.Thread(target=self._follow, name="ddpjob-ui-job", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the first look."""
        self._ready.wait(seconds)

    def _follow(self) -> None:
        while True:
            with self._lock:
                if time.monotonic() - self._viewed > _LEFT:
                    self._thread = None
                    return
            began = time.monotonic()
            try:
                self._look()
            except JobNotFoundError:
                pass  # the watch will say so
            except StoppedError:
                return
            except Exception as error:  # of a record of any form; the thread must go on
                self._say(_not_shown(self._key[1], error))
            finally:
                self._ready.set()
            time.sleep(max(LOOK_SECONDS, 2 * (time.monotonic() - began)))

    def _look(self) -> None:
        found = self._jobs.job(*self._key)
        if found is None:
            if self.job is not None and self._jobs.trouble is None:
                self._say(JobNotFoundError(f"the job {self._key[1]} was deleted", "the page shows what was seen last"))
            return
        if self.job is not None and self.job.uid != found.uid:
            self._begin()
        has_changed, self.job = found is not self.job, found
        if has_changed:
            self._take_progress(found)
            self._read.pop("ranks", None)
        if has_changed or self._is_due("verdict", _VERDICT):
            self._verdict = _asked(lambda: verdict_of(self._client.explain(found)), not_read)
        if self._is_due("events", _EVENTS) or has_changed:
            self._events = _asked(lambda: events_of(self._client.timeline(found)), lambda _: self._events)
        if self.page is None:
            self._show(found)  # a kubelet that does not answer must not hide the verdict
        if self._is_due("log", _LOG):
            self._log = read_log(self._client, found)
        self._look_at_ranks(found)
        self._read_metrics(found)
        self._show(found)

    def _show(self, found: DDPJob) -> None:
        training = self._drawn(training_of(found, self._client.place, self._history or self._of_status(found)))
        self.page, self.trouble = page_of(training, self._verdict, self._events, self._log), None
        self.version += 1

    def _drawn(self, training: Training) -> Training:
        """Draw the curves unless they are the same: 100,000 steps take a third of a second. Return what they show."""
        source, failures, shown = self._source
        if source is None or source is not self._history or failures != training.job.failures:
            self._source = self._history, training.job.failures, training.history
            self.curves = curves_of(training.history, training.job)
            return training
        return replace(training, history=shown)

    def _say(self, trouble: DDPJobError) -> None:
        if str(trouble) != str(self.trouble):
            self.trouble = trouble
            self.version += 1

    def _is_due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._read.get(what, 0.0):
            return False
        self._read[what] = now + seconds
        return True

    def _look_at_ranks(self, found: DDPJob) -> None:
        self.ranks = None
        if found.finished or not self._is_due("ranks", 0.0):
            return
        began = time.monotonic()
        try:
            self.ranks = self._client.ranks(found)
            self.strip.take(self.ranks)
        except DDPJobError:  # it starts, or another program has started the ranks: asked seldom then
            self._read["ranks"] = began + 5 * LOOK_SECONDS

    def _read_metrics(self, found: DDPJob) -> None:
        """Read the metrics of a job of this machine; those of a cluster are on a volume."""
        if not is_of_this_machine(self._client) or not self._is_due("metrics", 0.0):
            return
        began = time.monotonic()
        with contextlib.suppress(DDPJobError, recorded.DataMissing):
            directory: Path = self._client.metrics(found)
            self._history = recorded.read_history(directory)
        self._read["metrics"] = time.monotonic() + (time.monotonic() - began) / _SHARE

    def _take_progress(self, found: DDPJob) -> None:
        """Keep what the status says of the progress, for the curves of a job on a cluster."""
        progress = found.status.progress
        if progress is None or not progress.step or progress.last_heartbeat_time is None:
            return
        attempt = found.status.attempt or 0
        last = self._rows[-1] if self._rows else None
        if last is not None and (last.run, last.step) == (attempt, progress.step):
            return
        numbers = (_number(progress.loss), _number(progress.samples_per_second))
        time_ = parse_time(progress.last_heartbeat_time).timestamp()
        self._rows.append(StepRow(attempt, progress.step, *numbers, time_))
        if len(self._rows) > _MOST_ROWS:
            del self._rows[: _MOST_ROWS // 2 : 2]

    def _of_status(self, found: DDPJob) -> History:
        known, progress = without_metrics(found), found.status.progress
        total = progress.total_steps if progress is not None else None
        return History(known.runs, *_counted(self._rows), [], total, "")


def _counted(rows: Sequence[StepRow]) -> tuple[list[StepRow], list[StepRow]]:
    """Return the steps that count, and those that a later run computed again."""
    counted, again = list[StepRow](), list[StepRow]()
    later = first = math.inf  # the first step of all later runs, and of this one
    for at in range(len(rows) - 1, -1, -1):
        if at + 1 < len(rows) and rows[at].run != rows[at + 1].run:
            later, first = min(later, first), math.inf
        first = min(first, rows[at].step)
        (counted if rows[at].step < later else again).append(rows[at])
    return counted[::-1], again[::-1]


def _asked(ask: Callable[[], T], otherwise: Callable[[DDPJobError], T]) -> T:
    try:
        return ask()
    except (StoppedError, JobNotFoundError):
        raise
    except DDPJobError as error:
        return otherwise(error)


def _not_shown(name: str, error: Exception) -> DDPJobError:
    return DDPJobError(
        f"the page of {name} cannot be drawn: {type(error).__name__}: {error}"[:_LONGEST],
        "a field of the job has a form that this release does not know",
        f"ddpjob get {name} -o yaml shows the fields",
    )


def _number(text: str | None) -> float | None:
    try:
        return drawable(float(text)) if text is not None else None
    except ValueError:
        return None
