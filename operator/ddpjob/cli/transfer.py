"""How a transfer is shown on standard error: on a terminal one line that changes, elsewhere a line now and then."""

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

_SECONDS, _REDRAW_SECONDS = 10.0, 0.2


@contextmanager
def shown_transfer(*, quiet: bool = False) -> "Iterator[Callable[[PullProgress], None]]":
    """Show what the returned function is called with, a new wait at once. quiet: show nothing."""
    begin = shown = time.monotonic()
    waiting = ""
    is_terminal = sys.stderr.isatty()
    pause, end = (_REDRAW_SECONDS, "\x1b[K\r") if is_terminal else (_SECONDS, "\n")
    width = shutil.get_terminal_size().columns - 1 if is_terminal else None

    def show(progress: "PullProgress") -> None:
        nonlocal shown, waiting
        now = time.monotonic()
        is_due = progress.waiting != waiting if progress.waiting else now - shown >= pause
        waiting = progress.waiting
        if is_due and not quiet:
            shown = now
            part = (
                f"{100 * progress.done / progress.total:.0f} % of {size_text(progress.total)}, "
                if progress.total
                else ""
            )
            line = f"{duration(now - begin):>6}  {one_line(waiting or part + progress.path)}"
            print(line[:width], end=end, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_terminal and not quiet:
            print("\x1b[K", end="", file=sys.stderr, flush=True)
