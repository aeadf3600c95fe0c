"""One `ddpjob run` per job: an flock on a file that names its holder.

The kernel drops the lock with its holder, however that one ends; a pid file alone would outlive a SIGKILL.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddpjob.local.errors import LocalError

_PROBE_SECONDS = 0.5  # whoever only asks for the holder has the lock, shared, for a moment
_PAUSE = 0.02


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at ``path``. Raises ``LocalError`` naming ``what`` and the pid when another process holds it."""
    descriptor = _acquire(path, what)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def holder(path: Path) -> int | None:
    """Pid of the process that holds the lock at ``path``, else None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        deadline = time.monotonic() + _PROBE_SECONDS
        while not _try_lock(descriptor, shared=True):
            text = os.pread(descriptor, 32, 0).strip()
            if text.isdigit():
                return int(text)
            if time.monotonic() > deadline:
                return None  # held, but by nobody who signs: another one that asks, over and over
            time.sleep(_PAUSE)  # it was taken this very moment, its holder is about to sign
        return None
    finally:
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # specs and logs may hold what is private
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor, shared=False):
            if _is_at(path, descriptor):
                return descriptor
        elif time.monotonic() > deadline:
            text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LocalError(
                f"{what} is running already, in process {text or 'unknown'}",
                "one `ddpjob run` at a time works on a job",
                "follow it with `ddpjob get` and `ddpjob logs`, stop it with Ctrl-C there, or use another --name",
            )
        os.close(descriptor)
        time.sleep(_PAUSE)


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    import fcntl  # noqa: PLC0415 - not on every system, and those that lack it shall get to read why they won't do

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one that others will open: a delete may have come between."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
