"""The clock of the API server, for the times that are written into status and later compared with deadlines."""

import email.utils
import time
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from ddpjob.clock import SteadyClock, boot_seconds

DRIFT = 0.0005
"""Relative difference in speed of two computers' clocks; NTP corrects up to 500 ppm."""
SLEW = 0.1
"""Largest change of the offset to the server's clock per second. A deadline is missed by at most this share."""
LOCAL_ERROR = 5.0
"""By how much the local clock may be wrong without contradicting a first response."""


class _Bounds(NamedTuple):
    """Bounds of the offset to the server's clock, as they were at a time of the monotonic clock."""

    low: float
    high: float
    at: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def narrowed(self, given: "_Bounds") -> "_Bounds | None":
        """Return what both bounds allow at the time of the given ones, which are later; None if that is nothing."""
        widened = DRIFT * max(given.at - self.at, 0.0)
        low, high = max(given.low, self.low - widened), min(given.high, self.high + widened)
        return _Bounds(low, high, given.at) if low <= high else None


class ServerClock(SteadyClock):
    """The API server's clock, estimated from the header ``Date`` of its responses. ``now`` never goes backwards.

    ``Date`` is the time of the response in whole seconds, rounded down. With the monotonic times at which the request
    was sent and the response arrived it bounds the offset between both clocks from below and above. The bounds of many
    responses together are narrow; jitter only makes single ones wide. Until the first response that counts, the local
    clock gives the time.

    A response that contradicts what is known counts only if the next one agrees with it: one of several servers may
    have a wrong clock. Before the first that counts, the local clock is known, to some seconds; then the server's time
    is set at once. Later, the server's clock was set, and its time is approached by a tenth of the time that passes:
    jobs must not fail because an hour was skipped.
    """

    def __init__(self, *, monotonic: Callable[[], float] = boot_seconds, wall: Callable[[], float] = time.time) -> None:
        super().__init__(monotonic=monotonic, wall=wall)
        self._known = _Bounds(self._offset - LOCAL_ERROR, self._offset + LOCAL_ERROR, monotonic())
        self._doubtful: _Bounds | None = None
        self._has_counted = False
        self._slewed_at = monotonic()

    def observe(self, date: str | None, sent: float, received: float) -> None:
        """Take the header of a response; ``sent`` and ``received`` are times of ``monotonic``."""
        try:
            second = email.utils.parsedate_to_datetime(date or "").timestamp()
        except (ValueError, OverflowError):  # there is none, or it cannot be read
            return
        given = _Bounds(second - received, second + 1.0 - sent, received)
        agreed = self._known.narrowed(given) or (self._doubtful.narrowed(given) if self._doubtful else None)
        self._doubtful = None if agreed else given
        if agreed is None:
            return
        self._known = agreed if self._has_counted else given
        if not self._has_counted:
            self._has_counted, self._offset, self._slewed_at = True, given.middle, received

    def now(self) -> datetime:
        if self._has_counted:
            moment = self.monotonic()
            most = SLEW * max(moment - self._slewed_at, 0.0)
            wanted = self._known.middle - self._offset
            self._offset += max(-most, min(wanted, most))
            self._slewed_at = max(moment, self._slewed_at)
        return super().now()
