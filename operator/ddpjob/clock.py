"""A clock for the times that are written into status and later compared with deadlines.

It never reads the local wall clock after its creation: setting that by an hour would make every running job an hour
older at once.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime


def boot_seconds() -> float:
    """Return seconds since the boot of this computer. Unlike ``time.monotonic`` they pass while it is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The wall clock as it was at the creation of this object, continued with monotonic time."""

    def __init__(self, *, monotonic: Callable[[], float] = boot_seconds, wall: Callable[[], float] = time.time) -> None:
        self.monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return datetime.fromtimestamp(self.monotonic() + self._offset, UTC)
