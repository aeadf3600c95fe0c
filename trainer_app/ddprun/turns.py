"""Which process of a rank reports its steps to the launcher: a script may start several processes itself.

They share the memory of the rank. The first of them that makes a step writes, for as long as it lives.
"""

import fcntl
import os

_process = os.getpid()  # asked at each step, and a call of the kernel
_RANK = 0  # the byte that the rank's own process locks, for as long as it lives
BEATS, REPORTS = 1, 2


def _after_fork() -> None:
    global _process  # noqa: PLW0603 - each process has one
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


class Turn:
    """The right to write one of the two, heartbeat (BEATS) or progress (REPORTS).

    It is a lock on a byte of a file that the processes share. The kernel takes it away when its process ends, and does
    not pass it on to a fork.

    Args:
        descriptor: of the file. Closed nowhere: that would end the locks.
        is_rank: this is the rank's own process, and not a process that it has started.
    """

    def __init__(self, descriptor: int, byte: int, *, is_rank: bool) -> None:
        self._descriptor, self._byte = descriptor, byte
        self._file = os.fstat(descriptor).st_ino
        self._rank, self._taken_by = _process if is_rank else 0, 0
        if is_rank:
            self._locks(_RANK, fcntl.LOCK_EX)

    @property
    def is_open(self) -> bool:
        """Whether the script has left the descriptor as it was; some programs close all."""
        try:
            return os.fstat(self._descriptor).st_ino == self._file
        except OSError:
            return False

    @property
    def is_taken(self) -> bool:
        """Whether this process has it, and the rank's process has not ended."""
        me = _process
        return self._taken_by == me and (self._rank == me or self._lasts())

    def take(self) -> bool:
        """Take it, if no other process has it; return whether this process has it now."""
        if self.is_taken:
            return True
        if not (self._lasts() and self._locks(self._byte, fcntl.LOCK_EX)):
            return False
        self._taken_by = _process
        return True

    def is_elsewhere(self) -> bool:
        """Return whether another process has it."""
        if self.is_taken or not self.is_open:
            return False
        if not self._locks(self._byte, fcntl.LOCK_EX):
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._byte)
        return False

    def may_write(self) -> bool:
        """Return whether this process has it, or is the rank's own and no process has it."""
        if self._taken_by == self._rank == _process:  # in almost all steps, and asked in each
            return True
        return self.is_taken or (self._rank == _process and not self.is_elsewhere())

    def _lasts(self) -> bool:
        return self._rank == _process or not self._locks(_RANK, fcntl.LOCK_SH)

    def _locks(self, byte: int, kind: int) -> bool:
        if not self.is_open:
            return self._rank == _process
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True
