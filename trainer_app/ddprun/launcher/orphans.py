"""What the processes of ranks leave behind when they end: children in any session, and files of shared memory.

The launcher is the subreaper of its ranks: the kernel makes it the parent of every process whose parent has ended. So
it finds them all, however they were started, and no process id is that of another process before the launcher has
collected its exit status.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from ddprun import proc
from ddprun.signals import adopt_orphans

_ASKED = 1.0  # seconds between SIGTERM and SIGKILL
_FORCED = 5.0  # seconds to wait after SIGKILL: a file system that does not answer delays even that
SHARED_MEMORY = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_")  # the process that has created it


class Orphans:
    """The processes that ranks leave behind. Create it before the first rank starts.

    The launcher's own process group, and those of the children that it has already, are another program's: of a shell
    that has started a server in the background and then become the launcher.
    """

    def __init__(self) -> None:
        adopt_orphans()
        self._foreign = {os.getpgrp(), *filter(None, map(_group, proc.children(os.getpid())))}
        self._asked: set[int] = set()
        self._deadline: float | None = None
        self._began = time.time()
        self._collected: set[int] = set()

    def collected(self, pid: int) -> None:
        """Take note of a rank or another process whose exit status was collected."""
        self._collected.add(pid)

    @property
    def is_empty(self) -> bool:
        """Whether no process is left."""
        return not self._left()

    def _left(self) -> list[int]:
        return [pid for pid in proc.children(os.getpid()) if _group(pid) not in (None, *self._foreign)]

    def remain(self, until: float | None = None) -> bool:
        """Return whether any are left, after all ranks have ended. Tell them to end, and kill them when time is over.

        Args:
            until: when they are killed, by time.monotonic; by default after a second.
        """
        left = self._left()
        if not left:
            return False
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = max(now + _ASKED, until or 0.0)
        for pid in left:
            with contextlib.suppress(PermissionError):  # of another user, such as what sudo has started
                if now >= self._deadline:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in self._asked:
                    self._asked.add(pid)
                    os.kill(pid, signal.SIGTERM)
        return now < self._deadline + _FORCED

    def remove_shared_memory(self) -> None:
        """Delete the files that torch names after the processes that have ended."""
        with contextlib.suppress(OSError):
            for file in SHARED_MEMORY.iterdir():
                found = _OF_TORCH.match(file.name)
                if found and int(found[1]) in self._collected and self._is_left(file, int(found[1])):
                    file.unlink()

    def _is_left(self, file: Path, creator: int) -> bool:
        """Return whether the file is of this run: another process may have had its creator's number before or since."""
        status = file.lstat()
        is_of_run = status.st_uid == os.geteuid() and status.st_ctime >= self._began - 1
        return is_of_run and not Path(f"/proc/{creator}").exists()


def _group(pid: int) -> int | None:
    """Return the process group of a child; None if it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
