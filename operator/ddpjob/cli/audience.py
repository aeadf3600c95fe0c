"""Standard output whose reader may leave at any time: a pager that is quit, a terminal that is closed."""

import os
from collections.abc import Callable
from typing import TextIO, cast


class Audience:
    """A text stream that writes as long as somebody reads, then falls silent and says so once.

    Training goes on for a moment then: the trainer is asked to save and leave, as for Ctrl-C.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = False
        self.on_leave: Callable[[], None] = lambda: None

    def write(self, text: str) -> int:
        """As a stream's."""
        if not self._left:
            try:
                return self._stream.write(text)
            except (BrokenPipeError, OSError):
                self._leave()
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        if not self._left:
            try:
                self._stream.flush()
            except (BrokenPipeError, OSError):
                self._leave()

    @property
    def stream(self) -> TextIO:
        """Itself, to whoever asks for a stream; all else that a stream can do, the stream below does."""
        return cast(TextIO, self)

    def is_terminal(self) -> bool:
        """Whether a table can stay in place there."""
        return self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        self._left = True
        # What is still buffered would fail again when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self.on_leave()
