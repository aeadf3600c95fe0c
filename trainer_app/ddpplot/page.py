"""One HTML page about a training, without scripts and without requests to a network. Every text is escaped."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from ddpplot import figure
from ddpplot.history import History, Run, RunFailure, loss_text
from ddpplot.job import FORMULA, JobRecord

STYLE = figure.STYLE + Markup((Path(__file__).parent / "templates" / "page.css").read_text())  # noqa: S704 - a constant
_STARTS = 50  # that the table of runs shows, the newest


@dataclass(frozen=True)
class Verdict:
    """Why a job is in its state. advice: label and text, such as the next command; evidence: what it rests on."""

    sentence: str
    is_abnormal: bool = False
    advice: Sequence[tuple[str, str]] = ()
    evidence: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class PageEvent:
    """Something that happened to a job. time: RFC 3339."""

    time: str
    source: str
    reason: str
    message: str
    is_warning: bool = False
    count: int = 1


@dataclass(frozen=True)
class TrainingPage:
    """What the page shows.

    Attributes:
        title: the name of the training.
        program: which program made the page, with its version.
        job: what its status adds; None for a training without one.
        facts: label, text, and whether it is abnormal; a fact without a label belongs to the one above it.
        log: the last lines of a log, and of which.
    """

    title: str
    program: str
    history: History
    job: JobRecord | None = None
    verdict: Verdict | None = None
    facts: Sequence[tuple[str, str, bool]] = ()
    events: Sequence[PageEvent] = ()
    log: tuple[str, Sequence[str]] = ("", ())

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
    """Return the page as one file, which needs nothing else."""
    return render(figure.TEMPLATES, "page.html.j2", page, policy=policy(STYLE), style=STYLE)


def curves_of(history: History, job: JobRecord | None) -> Sequence[str]:
    """Return the curves in the two widths of the page; none of a job without metrics."""
    widths = (960, 400) if history.steps or history.evaluations or job is None else ()
    return [Markup(figure.drawing(history, width, is_page=True)) for width in widths]  # noqa: S704 - escapes its texts


def render(
    templates: Environment, name: str, page: TrainingPage, curves: Sequence[str] | None = None, **more: object
) -> str:
    """Return the page by a template, which is or extends ``page.html.j2``.

    curves: those of the history, if they were drawn before. more: other variables of the template.
    """
    templates.filters.update(duration=duration, loss=loss_text)
    history, starts = page.history, bars(page.history, page.job)
    return templates.get_template(name).render(
        page=page,
        history=history,
        job=page.job,
        curves=curves_of(history, page.job) if curves is None else curves,
        last=history.evaluations[-1] if history.evaluations else None,
        throughput=history.throughput,
        bars=starts[-_STARTS:],
        earlier=len(starts[:-_STARTS]),
        formula=FORMULA,
        **more,
    )


def policy(style: str, others: str = "") -> str:
    """Return the Content-Security-Policy of a page: this style sheet and no other, no script, no request.

    others: directives that allow more.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return Markup(f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:{others}")  # noqa: S704 - constants


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
