"""How a transfer is shown on standard error: one line that changes on a terminal, a line now and then elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddpjob.cli.text import duration, one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpjob.client.volume.contents import PullProgress

_INTERVAL, _ON_TERMINAL = 10.0, 0.2  # seconds
_CLEAR = "\r\x1b[K"


@contextmanager
def shown_transfer(*, quiet: bool = False) -> "Iterator[Callable[[PullProgress], None]]":
    """Show what the returned function is called with, until the end of the block. quiet: show nothing."""
    is_terminal = sys.stderr.isatty()
    interval = _ON_TERMINAL if is_terminal else _INTERVAL
    begin = shown = time.monotonic()
    waiting = ""

    def show(progress: "PullProgress") -> None:
        nonlocal shown, waiting
        now = time.monotonic()
        is_due = progress.waiting != waiting if progress.waiting else now - shown >= interval
        waiting = progress.waiting
        if quiet or not is_due:
            return
        shown = now
        share = (
            f"{100 * progress.done / progress.total:.0f} % of {size_text(progress.total)}, " if progress.total else ""
        )
        line = f"{duration(now - begin):>6}  {one_line(waiting or share + progress.path)}"
        if is_terminal:
            columns = shutil.get_terminal_size().columns
            print(f"{_CLEAR}{line[: columns - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_terminal and not quiet:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
