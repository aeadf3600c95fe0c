"""What the controller's parts log goes into the job's folder: a terminal that shows a table has no place for it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Write the log of package ``ddpjob`` to ``controller.log`` there, anew, and nowhere else meanwhile."""
    logger = logging.getLogger("ddpjob")
    before = logger.level, logger.propagate
    handler = logging.FileHandler(folder / "controller.log", "w")
    handler.setFormatter(logging.Formatter(_FORM))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]
