"""An event loop with simulated time that jumps to the next timer, so hours of backoff take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the time instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise AssertionError("everything waits and nothing is due: a deadlock")
            self.now += max(timeout, 0.0)
        return events


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time, starting at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop with simulated time."""
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        return runner.run(coroutine)
