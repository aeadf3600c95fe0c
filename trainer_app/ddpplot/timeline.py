"""When each start of a training ran and how it ended, as bars on one time axis. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddpplot.history import Failure, History, Run
from ddpplot.job import Job


@dataclass(frozen=True)
class Bar:
    """One start of the ranks.

    Attributes:
        run: None for an attempt that failed before it recorded any metrics.
        failure: why it ended, if it failed.
        left, width: its place on the axis, in percent.
    """

    run: Run | None
    failure: Failure | None
    left: float
    width: float


def bars(history: History, job: Job | None) -> list[Bar]:
    """Return the bars of all runs, and of the attempts and lives whose failure alone is known, in order of time."""
    first, last = span(history, job)
    whole = (last - first) or 1.0

    def bar(run: Run | None, failure: Failure | None, began: float | None, ended: float | None) -> Bar:
        left = 100 * min(max(0.0, (began or first) - first) / whole, 0.99)
        width = 100 * max(0.0, (ended or first) - (began or first)) / whole
        return Bar(run, failure, left, max(1.0, min(width, 100 - left)))

    attached = {id(run.failure) for run in history.runs}
    others: Sequence[Failure] = [f for f in (job.failures if job else ()) if id(f) not in attached]
    found = [(one.time or first, bar(None, one, one.time, one.time)) for one in others]  # before what they started
    found += [(run.began or first, bar(run, run.failure, run.began, run.ended)) for run in history.runs]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def span(history: History, job: Job | None) -> tuple[float, float]:
    """Return begin and end of the axis: those of the job, else from the first row of the metrics to the last."""
    begins = [time for time in (history.began, job.began if job else None) if time is not None]
    ends = [time for time in (history.ended, job.ended if job else None) if time is not None]
    first = min(begins, default=0.0)
    return first, max([first, *ends])
