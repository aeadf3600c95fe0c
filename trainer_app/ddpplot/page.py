"""One HTML page about a training, without scripts and without requests to a network. Every text is escaped."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ddpplot import figure
from ddpplot.history import History, Run, RunFailure, loss_text
from ddpplot.job import FORMULA, JobRecord


@dataclass(frozen=True)
class TrainingPage:
    """What the page shows.

    Attributes:
        title: the name of the training.
        program: which program made the page, with its version.
        job: what its status adds; None for a training without one.
    """

    title: str
    program: str
    history: History
    job: JobRecord | None = None

    @property
    def seconds(self) -> float:
        """From the creation of the job, else from the start of the first run, to the end; restarts included."""
        first, last = span(self.history, self.job)
        return last - first


@dataclass(frozen=True)
class Bar:
    """One start of the ranks, on the time axis of the page.

    Attributes:
        run: None for an attempt that failed before it recorded any metrics.
        failure: why it ended, if it failed.
        left, width: its place on the axis, in percent.
    """

    run: Run | None
    failure: RunFailure | None
    left: float
    width: float


def as_html(page: TrainingPage) -> str:
    """Return the page."""
    figure.TEMPLATES.filters.update(duration=duration, loss=loss_text)
    history = page.history
    widths = (960, 400) if history.steps or history.evaluations or page.job is None else ()
    return figure.TEMPLATES.get_template("page.html.j2").render(
        page=page,
        history=history,
        job=page.job,
        style=figure.STYLE,
        curves=[Markup(figure.drawing(history, width, is_page=True)) for width in widths],  # noqa: S704 - escapes its texts
        last=history.evaluations[-1] if history.evaluations else None,
        throughput=history.throughput,
        bars=bars(history, page.job),
        formula=FORMULA,
    )


def bars(history: History, job: JobRecord | None) -> list[Bar]:
    """Return the bars of all runs, and of the attempts and lives whose failure alone is known, in order of time."""
    first, last = span(history, job)
    whole = (last - first) or 1.0

    def bar(run: Run | None, failure: RunFailure | None, began: float | None, ended: float | None) -> Bar:
        left = 100 * min(max(0.0, (began or first) - first) / whole, 0.99)
        width = 100 * max(0.0, (ended or first) - (began or first)) / whole
        return Bar(run, failure, left, max(1.0, min(width, 100 - left)))

    attached = {id(run.failure) for run in history.runs}
    others: Sequence[RunFailure] = [f for f in (job.failures if job else ()) if id(f) not in attached]
    found = [(one.time or first, bar(None, one, one.time, one.time)) for one in others]  # before what they started
    found += [(run.began or first, bar(run, run.failure, run.began, run.ended)) for run in history.runs]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def span(history: History, job: JobRecord | None) -> tuple[float, float]:
    """Return begin and end of the axis: those of the job, else from the first row of the metrics to the last."""
    begins = [time for time in (history.began, job.began if job else None) if time is not None]
    ends = [time for time in (history.ended, job.ended if job else None) if time is not None]
    first = min(begins, default=0.0)
    return first, max([first, *ends])


def duration(seconds: float) -> str:
    """Return the time in at most two units, such as ``1 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 and seconds % 1 else f"{seconds:.0f} s"
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    return f"{minutes[0]} min {minutes[1]} s" if seconds < 3600 else f"{hours[0]:,} h {hours[1]} min"
