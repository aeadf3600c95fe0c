"""The delay before the next try, which doubles with each failure in a row."""

import hashlib


def doubling(first: float, tries: int, most: float) -> float:
    """Return the seconds to wait after this many failed tries in a row: first, 2 first, 4 first, ... at most ``most``.

    Args:
        first: seconds after the first failure.
        tries: failures in a row, at least 1.
        most: the longest delay, in seconds.
    """
    return min(first * 2.0 ** min(tries - 1, 20), most)


def jittered(seconds: float, key: str) -> float:
    """Return the seconds without up to a quarter, so that jobs that fail together do not start again together.

    The part is drawn from ``key``, and so the same in every plan.
    """
    drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
    return seconds * (1 - drawn / 4)


class Patience:
    """Decides how long the failures of a client in a row are survived, and how long to wait after each.

    seconds: from the first failure of the row to the last one that a further try follows.
    """

    SECONDS = 300.0
    """The default: longer than an API server takes to restart."""
    FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = self.SECONDS if seconds is None else seconds
        self._since: float | None = None
        self._tries = 0

    def reset(self) -> None:
        """Begin again after a success."""
        self._since, self._tries = None, 0

    def delay(self, now: float, seconds: float | None = None) -> float | None:
        """Return the seconds to wait after a failure, or None if no further try follows.

        Args:
            now: by any clock that is not set back, in seconds.
            seconds: a shorter time than that of the row, for this failure.
        """
        self._since = now if self._since is None else self._since
        if now - self._since > min(self.seconds, self.seconds if seconds is None else seconds):
            return None
        self._tries += 1
        return doubling(self.FIRST_DELAY, self._tries, self.LONGEST_DELAY)
