"""The delay before the next try, which doubles with each failure in a row."""


def doubling(first: float, tries: int, most: float) -> float:
    """Return the seconds to wait after this many failed tries in a row: first, 2 first, 4 first, ... at most ``most``.

    Args:
        first: seconds after the first failure.
        tries: failures in a row, at least 1.
        most: the longest delay, in seconds.
    """
    return min(first * 2.0 ** min(tries - 1, 20), most)
