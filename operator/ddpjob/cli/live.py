"""A run on a terminal: one table that stays in place, with everything else scrolling past above it."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob.cli.output import size_text
from ddpjob.cli.snapshot import NodeState, Snapshot
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import accuracy_text, age, duration, one_line, ranks_text, sanitize_line, speed_text

_STYLES = {
    "Running": "bold cyan",
    "Succeeded": "bold green",
    "Completed": "green",
    "Failed": "bold red",
    "Error": "bold red",
    "Restarting": "bold yellow",
    "Suspended": "bold magenta",
}
_MOST_NODES = 12  # rows; a table taller than the terminal cannot stay in place
_REFRESHES_PER_SECOND = 8
_HISTORY = 512  # losses; a longer course is kept half as finely


class LiveDisplay:
    """Draws the table anew several times a second, so that clocks move while nothing else does."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._begin = clock()
        self._facts: Snapshot | None = None
        self._losses: list[float] = []
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._live.stop()

    def show(self, facts: Snapshot) -> None:
        """Only remembers: the table is drawn at its own pace."""
        if facts.loss and (self._facts is None or facts.step != self._facts.step):
            with contextlib.suppress(ValueError):  # a trainer of any make fills this in
                self._losses.append(float(facts.loss))
            if len(self._losses) > _HISTORY:
                self._losses = [(a + b) / 2 for a, b in zip(self._losses[::2], self._losses[1::2], strict=False)]
        self._facts = facts
        if not self._live.is_started:  # not before: a job that is refused leaves no empty table
            self._live.start()

    def note(self, line: str, *, loud: bool = False) -> None:
        """Above the table."""
        text = Text(f"! {one_line(line)}", "bold yellow") if loud else Text(f"· {one_line(line)}", "dim")
        self._console.print(text)

    def output(self, line: str) -> None:
        """Above the table."""
        self._console.print(Text.assemble(("n0 ", "cyan"), sanitize_line(line)), soft_wrap=True)

    def end(self, result: RunResult) -> None:
        """The table stays as it is; the ending follows."""
        self._live.stop()
        style = "red" if result.failed else ""
        width = min(self._console.width, 100)
        for number, line in enumerate(summary_lines(result, width=width)):
            heading = line and not line.startswith((" ", "n"))
            self._console.print(
                Text(line, style=style if result.failed and heading else "bold" if number == 1 else ""), soft_wrap=True
            )

    def _draw(self) -> RenderableType:
        return Text() if self._facts is None else self.table(self._facts)

    def table(self, facts: Snapshot) -> RenderableType:
        """The whole table for these facts."""
        parts: list[RenderableType] = [Text(), self._head(facts)]
        if facts.total_steps or facts.phase or facts.step:
            parts += [_bar(facts), self._training(facts)]
        parts.append(_nodes(facts.nodes))
        if facts.message and facts.state not in ("Failed", "Suspended"):  # the ending says it, with what to do
            parts.append(Text(facts.message, style="yellow"))
        return Group(*parts)

    def _head(self, facts: Snapshot) -> Text:
        ranks = f" = {ranks_text(facts.num_nodes * facts.nproc_per_node)}" if facts.nproc_per_node else ""
        return Text.assemble(
            (facts.name, "bold"),
            "  ",
            (facts.state, _STYLES.get(facts.state, "bold")),
            f"  {size_text(facts)}{ranks}",
            (f"  attempt {facts.attempt}", "dim" if facts.attempt <= 1 else ""),
            (f"  restarts {facts.restarts} of at most {facts.max_restarts}", "yellow" if facts.restarts else "dim"),
            f"  {duration(self._clock() - self._begin)}",
        )

    def _training(self, facts: Snapshot) -> Text:
        parts: list[str | tuple[str, str]] = [
            ("loss ", "dim"),
            facts.loss or "–",
            (f" {sparkline(self._losses)}", "cyan"),
            ("   accuracy ", "dim"),
            (accuracy_text(facts.accuracy), "bold green") if facts.accuracy else "–",
        ]
        if facts.samples_per_second:
            parts.append(f"   {speed_text(facts.samples_per_second)}")
        if facts.checkpoint_step is not None:
            parts += [("   checkpoint of step ", "dim"), str(facts.checkpoint_step)]
        if facts.resumed_from_step is not None:
            parts += [("   resumed from step ", "dim"), str(facts.resumed_from_step)]
        return Text.assemble(*parts)


def _bar(facts: Snapshot) -> RenderableType:
    if not facts.total_steps:
        return Text(f"step {facts.step}" if facts.step else facts.phase or "", style="dim")
    bar = ProgressBar(total=facts.total_steps, completed=facts.step or 0, width=36)
    done = f"{facts.percent or 0} %  step {facts.step or 0}/{facts.total_steps}"
    left = f"{duration(facts.eta_seconds)} left" if facts.eta_seconds else (facts.phase or "")
    epoch = f"epoch {facts.epoch or 0}/{facts.total_epochs or '?'}"
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(epoch), bar, Text(done), Text(left, style="dim"))
    return row


def _nodes(nodes: tuple[NodeState, ...]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("NODE", "POD", "STATE", "FOR", ""):
        table.add_column(column, no_wrap=column != "")
    # Where not all fit, those that need attention do.
    usual = [node for node in nodes if node.state in ("Running", "Completed")]
    shown = sorted([node for node in nodes if node not in usual][:_MOST_NODES], key=lambda node: node.rank)
    shown = sorted([*shown, *usual[: _MOST_NODES - len(shown)]], key=lambda node: node.rank)
    for node in shown:
        style = _STYLES.get(node.state, "yellow")
        table.add_row(f"n{node.rank}", node.pod, Text(node.state, style), age(node.since), Text(node.detail))
    if len(shown) < len(nodes):
        table.add_row("", f"… and {len(nodes) - len(shown)} more", "", "", "")
    return table


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """All values as a line of bars, lowest to highest; each bar is the mean of its share of them."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    edges = [len(finite) * i // count for i in range(count + 1)]
    shown = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(shown), max(shown)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low))] if high > low else "▁" for v in shown)
