"""One HTML page about a training, without scripts and without requests to a network. Every text is escaped."""

from dataclasses import dataclass

from markupsafe import Markup

from ddpplot import figure
from ddpplot.history import History, loss_text
from ddpplot.job import FORMULA, Job
from ddpplot.timeline import bars, span


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        title: the name of the training.
        program: which program made the page, with its version.
        job: what its status adds; None for a training without one.
    """

    title: str
    program: str
    history: History
    job: Job | None = None

    @property
    def seconds(self) -> float:
        """From the creation of the job, else from the start of the first run, to the end; restarts included."""
        first, last = span(self.history, self.job)
        return last - first


def as_html(page: Page) -> str:
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


def duration(seconds: float) -> str:
    """Return the time in at most two units, such as ``1 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 and seconds % 1 else f"{seconds:.0f} s"
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    return f"{minutes[0]} min {minutes[1]} s" if seconds < 3600 else f"{hours[0]:,} h {hours[1]} min"
