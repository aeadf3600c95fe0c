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
        yield _Lines().show


class _Lines:
    def __init__(self) -> None:
        self._begin = self._shown = time.monotonic()
        self._waiting = ""

    def show(self, progress: "PullProgress") -> None:
        now = time.monotonic()
        if progress.waiting and progress.waiting != self._waiting:
            self._print(progress.waiting)
        elif not progress.waiting and now - self._shown >= _INTERVAL:
            share = f"{100 * progress.done / progress.total:.0f} % of {size_text(progress.total)}, "
            self._print((share if progress.total else "") + progress.path)
        self._waiting = progress.waiting

    def _print(self, text: str) -> None:
        self._shown = time.monotonic()
        print(f"{duration(self._shown - self._begin):>6}  {one_line(text)}", file=sys.stderr, flush=True)


@contextmanager
def _bar() -> "Iterator[Callable[[PullProgress], None]]":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: "PullProgress") -> None:
            done, total = (progress.done, progress.total) if progress.total else (None, None)
            bar.update(task, description=one_line(progress.waiting or progress.path), completed=done, total=total)

        yield show
