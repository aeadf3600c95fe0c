"""A run on a terminal: one table that stays in place, below the lines of notes and output. Imports rich."""

import textwrap
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob.cli.card import Moment, pod_state, pod_text
from ddpjob.cli.output import Display, of_process
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import age, duration, one_line
from ddpjob.client.timeline import JobPod

_STYLES = {
    "Running": "bold cyan",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Suspended": "bold magenta",
}
_OTHER_STYLE = "bold yellow"  # what needs attention, or does not last
_NO_BREAK = "\u00a0"
_MOST_NODES = 12  # rows; a table taller than the terminal cannot stay in place


class LiveDisplay(Display):
    """Redraws the table several times a second, so that times advance between changes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._begin = clock()
        self._moment: Moment | None = None
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __exit__(self, *reason: object) -> None:
        self._live.stop()

    def show(self, moment: Moment) -> None:
        """Keep the moment for the next redraw."""
        self._moment = moment
        if not self._live.is_started:  # not earlier, so that a refused job leaves no empty table
            self._live.start()

    def note(self, line: str, *, loud: bool = False) -> None:
        self._console.print(Text(f"{'!' if loud else '·'} {one_line(line)}", "bold yellow" if loud else "dim"))

    def output(self, line: str) -> None:
        who, text = of_process(line)
        self._console.print(Text.assemble((f"{who} ", "cyan"), text), soft_wrap=True)

    def end(self, result: RunResult) -> None:
        """Stop redrawing and print the summary below the table."""
        self._live.stop()
        empty, headline, *others = summary_lines(result, width=min(self._console.width, 100))
        self._console.print(empty)
        self._console.print(Text(headline, "red" if result.failed else "bold"), soft_wrap=True)
        for line in others:
            self._console.print(Text(line), soft_wrap=True)

    def _draw(self) -> RenderableType:
        return Text() if self._moment is None else self.table(self._moment)

    def table(self, moment: Moment) -> RenderableType:
        """Return the whole table."""
        progress = moment.job.status.progress
        state = (moment.state, _STYLES.get(moment.state, _OTHER_STYLE))
        facts = [*moment.job_facts(), duration(self._clock() - self._begin)]
        parts: list[RenderableType] = [
            Text(),
            Text.assemble((one_line(moment.job.name), "bold"), "  ", state, "  ", "  ".join(facts)),
        ]
        if progress and progress.total_steps:
            parts.append(Padding(ProgressBar(progress.total_steps, progress.step or 0, width=60), 0))
        if training := moment.training_facts():
            parts.append(_wrapped(training, self._console.width))
        parts.append(_pods(moment.pods))
        if moment.news:
            parts.append(Text(moment.news, style="yellow"))
        return Group(*parts)


def _wrapped(facts: list[str], width: int) -> Text:
    """Return the facts on as many lines as they need; a line breaks between two facts only."""
    unbroken = "  ".join(fact.replace(" ", _NO_BREAK) for fact in facts)
    return Text(textwrap.fill(unbroken, width).replace(_NO_BREAK, " "))


def _pods(pods: list[JobPod]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("NODE", "POD", "STATE", "FOR", ""):
        table.add_column(column, no_wrap=column != "")
    # If not all fit, nodes that need attention are shown first.
    first = sorted(pods, key=lambda pod: pod.state in ("running", "succeeded"))[:_MOST_NODES]
    for pod in sorted(first, key=lambda pod: pod.node_rank):
        state = Text(pod_state(pod), _STYLES.get(pod.state.capitalize(), _OTHER_STYLE))
        since = age(pod.finished or pod.started or pod.created)
        text = Text(pod_text(pod, with_end=False))
        table.add_row(f"n{pod.node_rank}", Text(one_line(pod.name)), state, since, text)
    if len(first) < len(pods):
        table.add_row("", f"… and {len(pods) - len(first)} more", "", "", "")
    return table
