"""How a transfer is shown on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddpjob.cli.text import duration, one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpjob.client.volume.contents import PullProgress

_INTERVAL = 10.0


@contextmanager
def shown_transfer(*, quiet: bool = False) -> "Iterator[Callable[[PullProgress], None]]":
    """Show what the returned function is called with, until the end of the block. quiet: show nothing."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _lines()


def _lines() -> "Callable[[PullProgress], None]":
    """Return what prints a line at once for a new wait, and every few seconds for a transfer."""
    begin = shown = time.monotonic()
    waiting = ""

    def show(progress: "PullProgress") -> None:
        nonlocal shown, waiting
        now = time.monotonic()
        is_due = progress.waiting != waiting if progress.waiting else now - shown >= _INTERVAL
        waiting = progress.waiting
        if is_due:
            shown = now
            share = (
                f"{100 * progress.done / progress.total:.0f} % of {size_text(progress.total)}, "
                if progress.total
                else ""
            )
            text = waiting or share + progress.path
            print(f"{duration(now - begin):>6}  {one_line(text)}", file=sys.stderr, flush=True)

    return show


@contextmanager
def _bar() -> "Iterator[Callable[[PullProgress], None]]":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: "PullProgress") -> None:
            done, total = (progress.done, progress.total) if progress.total else (None, None)
            bar.update(task, description=one_line(progress.waiting or progress.path), completed=done, total=total)

        yield show
