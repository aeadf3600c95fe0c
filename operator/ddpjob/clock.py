"""A clock for the times that are written into status and later compared with deadlines.

It follows the local wall clock, but never jumps: setting that by an hour must not make every running job an hour older
at once.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.1
"""Largest correction per second. A deadline is missed by at most this share."""


def boot_seconds() -> float:
    """Return seconds since the boot of this computer. Unlike ``time.monotonic`` they pass while it is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The wall clock as it was at the creation of this object, continued with monotonic time.

    A wall clock that was set since is approached by ``SLEW``.
    """

    def __init__(self, *, monotonic: Callable[[], float] = boot_seconds, wall: Callable[[], float] = time.time) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._at = monotonic()
        self._offset = wall() - self._at

    def now(self) -> datetime:
        """Return the time, in UTC."""
        moment = self._monotonic()
        most = SLEW * (moment - self._at)
        self._offset += max(-most, min(self._wall() - moment - self._offset, most))
        self._at = moment
        return datetime.fromtimestamp(moment + self._offset, UTC)
