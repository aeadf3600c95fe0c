"""A run on a terminal: the card of the job and its pods, which stay in place below the lines of notes and output."""

from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from ddpjob.cli.card import Moment, card_lines, facts_of, headline
from ddpjob.cli.describe import pods_table
from ddpjob.cli.output import Display, of_process
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import one_line

_WIDEST = 120  # columns
_MOST_PODS = 8  # rows; what is taller than the terminal cannot stay in place


class LiveDisplay(Display):
    """Redraws the card several times a second, so that times advance between changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._moment: Moment | None = None
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __exit__(self, *reason: object) -> None:
        self._live.stop()

    def show(self, moment: Moment) -> None:
        """Keep the moment for the next redraw."""
        self._moment = moment
        if not self._live.is_started:  # not earlier, so that a refused job leaves no empty card
            self._live.start()

    def note(self, line: str, *, loud: bool = False) -> None:
        self._console.print(Text(f"{'!' if loud else '·'} {one_line(line)}", "bold yellow" if loud else "dim"))

    def output(self, line: str) -> None:
        who, text = of_process(line)
        self._console.print(Text.assemble((f"{who} ", "cyan"), text), soft_wrap=True)

    def end(self, result: RunResult) -> None:
        """Stop redrawing and print the summary below the card."""
        self._live.stop()
        empty, first, *others = summary_lines(result, width=min(self._console.width, 100))
        self._console.print(empty)
        self._console.print(Text(first, "red" if result.failed else "bold"), soft_wrap=True)
        for line in others:
            self._console.print(Text(line), soft_wrap=True)

    def _draw(self) -> RenderableType:
        return Text() if self._moment is None else self.drawn(self._moment)

    def drawn(self, moment: Moment) -> RenderableType:
        """Return the card and the pods, those that need attention first."""
        now, width, progress = datetime.now(UTC), min(self._console.width, _WIDEST), moment.job.status.progress
        card = card_lines(headline(moment.job, now), facts_of(moment.job, now), width=width, coloured=True)
        parts: list[RenderableType] = [Text(), *map(Text.from_ansi, card)]
        if progress and progress.total_steps:
            parts.append(Padding(ProgressBar(progress.total_steps, progress.step or 0, width=min(width, 60)), 0))
        pods = sorted(moment.pods, key=lambda pod: pod.state in ("running", "succeeded"))
        parts.append(pods_table(pods[:_MOST_PODS]))
        if len(pods) > _MOST_PODS:
            parts.append(Text(f"… and {len(pods) - _MOST_PODS} more"))
        return Group(*parts)
