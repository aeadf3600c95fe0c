"""A run on a terminal: one table that stays in place, below the lines of notes and output. Imports rich."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddpjob.cli.output import Display
from ddpjob.cli.snapshot import NodeState, Snapshot
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import accuracy_text, age, duration, one_line, ranks_text, sanitize_line, speed_text

_STYLES = {
    "Running": "bold cyan",
    "Succeeded": "bold green",
    "Completed": "green",
    "Failed": "bold red",
    "Error": "bold red",
    "Ending": "bold yellow",
    "Restarting": "bold yellow",
    "Suspended": "bold magenta",
}
_MOST_NODES = 12  # rows; a table taller than the terminal cannot stay in place
_REFRESHES_PER_SECOND = 8
_HISTORY = 512  # losses; beyond that, neighbours are averaged


class LiveDisplay(Display):
    """Redraws the table several times a second, so that times advance between changes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._begin = clock()
        self._snapshot: Snapshot | None = None
        self._losses: list[float] = []
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __exit__(self, *reason: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Keep the snapshot for the next redraw."""
        if snapshot.loss and (self._snapshot is None or snapshot.step != self._snapshot.step):
            with contextlib.suppress(ValueError):  # any trainer may fill this field
                self._losses.append(float(snapshot.loss))
            if len(self._losses) > _HISTORY:
                self._losses = [(a + b) / 2 for a, b in zip(self._losses[::2], self._losses[1::2], strict=False)]
        self._snapshot = snapshot
        if not self._live.is_started:  # not earlier, so that a refused job leaves no empty table
            self._live.start()

    def note(self, line: str, *, loud: bool = False) -> None:
        text = Text(f"! {one_line(line)}", "bold yellow") if loud else Text(f"· {one_line(line)}", "dim")
        self._console.print(text)

    def output(self, line: str) -> None:
        self._console.print(Text.assemble(("n0 ", "cyan"), sanitize_line(line)), soft_wrap=True)

    def end(self, result: RunResult) -> None:
        """Stop redrawing and print the summary below the table."""
        self._live.stop()
        style = "red" if result.failed else ""
        width = min(self._console.width, 100)
        for number, line in enumerate(summary_lines(result, width=width)):
            heading = line and not line.startswith((" ", "n"))
            self._console.print(
                Text(line, style=style if result.failed and heading else "bold" if number == 1 else ""), soft_wrap=True
            )

    def _draw(self) -> RenderableType:
        return Text() if self._snapshot is None else self.table(self._snapshot)

    def table(self, snapshot: Snapshot) -> RenderableType:
        """Return the whole table."""
        parts: list[RenderableType] = [Text(), self._head(snapshot)]
        if snapshot.total_steps or snapshot.phase or snapshot.step:
            parts += [_bar(snapshot), self._training(snapshot)]
        parts.append(_nodes(snapshot.nodes))
        if snapshot.message and snapshot.state not in ("Failed", "Suspended"):  # the summary prints it, with what to do
            parts.append(Text(snapshot.message, style="yellow"))
        return Group(*parts)

    def _head(self, snapshot: Snapshot) -> Text:
        ranks = f" = {ranks_text(snapshot.world_size)}" if snapshot.world_size else ""
        return Text.assemble(
            (snapshot.name, "bold"),
            "  ",
            (snapshot.state, _STYLES.get(snapshot.state, "bold")),
            f"  {_size_text(snapshot)}{ranks}",
            (f"  attempt {snapshot.attempt}", "dim" if snapshot.attempt <= 1 else ""),
            (
                f"  restarts {snapshot.restarts} of at most {snapshot.max_restarts}",
                "yellow" if snapshot.restarts else "dim",
            ),
            f"  {duration(self._clock() - self._begin)}",
        )

    def _training(self, snapshot: Snapshot) -> Text:
        parts: list[str | tuple[str, str]] = [
            ("loss ", "dim"),
            snapshot.loss or "–",
            (f" {sparkline(self._losses)}", "cyan"),
            ("   accuracy ", "dim"),
            (accuracy_text(snapshot.accuracy), "bold green") if snapshot.accuracy else "–",
        ]
        if snapshot.samples_per_second:
            parts.append(f"   {speed_text(snapshot.samples_per_second)}")
        if snapshot.checkpoint_step is not None:
            parts += [("   checkpoint of step ", "dim"), str(snapshot.checkpoint_step)]
        if snapshot.resumed_from_step is not None:
            parts += [("   resumed from step ", "dim"), str(snapshot.resumed_from_step)]
        return Text.assemble(*parts)


def _size_text(snapshot: Snapshot) -> str:
    """Return for example ``2 nodes × 2 processes``."""
    nodes = f"{snapshot.num_nodes} node" + ("s" if snapshot.num_nodes != 1 else "")
    nproc = snapshot.nproc_per_node
    return nodes if nproc is None else f"{nodes} × {nproc} process" + ("es" if nproc != 1 else "")


def _bar(snapshot: Snapshot) -> RenderableType:
    if not snapshot.total_steps:
        return Text(f"step {snapshot.step}" if snapshot.step else snapshot.phase or "", style="dim")
    bar = ProgressBar(total=snapshot.total_steps, completed=snapshot.step or 0, width=36)
    done = f"{snapshot.percent or 0} %  step {snapshot.step or 0}/{snapshot.total_steps}"
    left = f"{duration(snapshot.eta_seconds)} left" if snapshot.eta_seconds else (snapshot.phase or "")
    epoch = f"epoch {snapshot.epoch or 0}/{snapshot.total_epochs or '?'}"
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(epoch), bar, Text(done), Text(left, style="dim"))
    return row


def _nodes(nodes: tuple[NodeState, ...]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("NODE", "POD", "STATE", "FOR", ""):
        table.add_column(column, no_wrap=column != "")
    # If not all fit, nodes that need attention are shown first.
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
    """Return the values as bars from lowest to highest; each bar is the mean of an equal share of them."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    edges = [len(finite) * i // count for i in range(count + 1)]
    shown = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(shown), max(shown)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low))] if high > low else "▁" for v in shown)
