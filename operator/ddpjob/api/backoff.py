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
