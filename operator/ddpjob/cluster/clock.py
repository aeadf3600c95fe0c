"""Clocks for the times that are written into status and later compared with deadlines.

They never read the local wall clock after their creation: setting it by an hour would make every running job an hour
older at once.
"""

import email.utils
import time
from collections.abc import Callable
from datetime import UTC, datetime

DRIFT = 0.0005
"""Relative difference in speed of two computers' clocks; NTP corrects up to 500 ppm."""
SLEW = 0.1
"""Largest change of the offset to the server's clock per second. A deadline is missed by at most this share."""


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


class ServerClock(SteadyClock):
    """The API server's clock, estimated from the header ``Date`` of its responses. ``now`` never goes backwards.

    ``Date`` is the time of the response in whole seconds, rounded down. With the monotonic times at which the request
    was sent and the response arrived it bounds the offset between both clocks from below and above. The bounds of many
    responses together are narrow; jitter only makes single ones wide. Before the first response, the local
    clock gives the time.

    If a response contradicts the bounds, the server's clock was set, or another server with another clock answered.
    Its time is then approached by a tenth of the time that passes: jobs must not fail because an hour was skipped.
    """

    def __init__(self, *, monotonic: Callable[[], float] = boot_seconds, wall: Callable[[], float] = time.time) -> None:
        super().__init__(monotonic=monotonic, wall=wall)
        self._bounds: tuple[float, float] | None = None
        self._bounded_at = 0.0
        self._slewed_at = monotonic()

    def observe(self, date: str | None, sent: float, received: float) -> None:
        """Take the header of a response; ``sent`` and ``received`` are times of ``monotonic``."""
        second = _seconds(date)
        if second is None:
            return
        low, high = second - received, second + 1.0 - sent
        if self._bounds is None:
            self._offset = (low + high) / 2
            self._slewed_at = received
        else:
            widened = DRIFT * max(received - self._bounded_at, 0.0)
            known_low, known_high = self._bounds[0] - widened, self._bounds[1] + widened
            if max(low, known_low) <= min(high, known_high):
                low, high = max(low, known_low), min(high, known_high)
        self._bounds, self._bounded_at = (low, high), received

    def now(self) -> datetime:
        if self._bounds is not None:
            moment = self.monotonic()
            most = SLEW * max(moment - self._slewed_at, 0.0)
            wanted = sum(self._bounds) / 2 - self._offset
            self._offset += max(-most, min(wanted, most))
            self._slewed_at = max(moment, self._slewed_at)
        return super().now()


def _seconds(date: str | None) -> float | None:
    """Return the seconds since 1970 of an HTTP date, or None if there is none or it cannot be read."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError):
        return None
