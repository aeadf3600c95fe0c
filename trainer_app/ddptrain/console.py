"""What a person sees of rank 0: lines, and on a terminal one updating bar.

``cli``, ``model_verbs`` and ``children`` make it; ``worker``, ``train`` and ``telling`` speak through it. Of a launched
rank, ``relay`` takes the lines on to the launcher's own output.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ddptrain.finite import dumps

_WIDTH = 24
_LINE_INTERVAL = 5.0  # seconds between progress lines where there is no terminal
_BAR_INTERVAL = 0.1


class Console:
    """Speaks for rank 0 and is silent for the others.

    Args:
        terminal: stream of a terminal for the bar, or None. A launched rank's own stdout is a pipe to the launcher.
        as_json: no bar: whoever reads objects, which ``streams`` or the launcher makes of lines, wants nothing else.
    """

    def __init__(self, rank: int, terminal: TextIO | None, *, as_json: bool = False) -> None:
        self._quiet, self._terminal = rank != 0, None if as_json else terminal
        self._shown = 0.0
        self._drawn = False

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            self._erase()
            self._print(text)

    def step(self, done: int, total: int, text: str) -> None:
        """Progress: redraws the bar, or says a line every few seconds."""
        now = time.monotonic()
        interval = _BAR_INTERVAL if self._terminal else _LINE_INTERVAL
        if self._quiet or (now - self._shown < interval and done != total):
            return
        self._shown = now
        if self._terminal is None:
            self._print(f"step {done}/{total} · {text}")
            return
        full = _WIDTH * done // max(1, total)
        self._terminal.write(f"\r\x1b[K{'█' * full}{'░' * (_WIDTH - full)} {done}/{total} · {text}")
        self._terminal.flush()
        self._drawn = True

    def _print(self, text: str) -> None:
        print(text, flush=True)

    def _erase(self) -> None:
        if self._drawn and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._drawn = False


def tagged(rank: int | None, text: str) -> str:
    """A line of output as JSON: when, which rank, what."""
    return dumps({"time": round(time.time(), 3), "rank": rank, "message": text})


def terminal_of(stream: TextIO = sys.stderr) -> TextIO | None:
    """The stream if a person watches it."""
    return stream if stream.isatty() else None
