"""SIGTERM, SIGINT and SIGHUP set a flag; the phase decides when the process acts on it.

Installed before anything slow: PID 1 of a container has no default action for SIGTERM and would ignore it. Before
training a rank may exit by itself. In training the flag is part of the small all-reduce of each step, and all ranks
read its result after the same steps (``--log-every``), so that all exit after the same step: a rank that exited alone
would leave the others waiting in a collective.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import FrameType

from ddprun import exit_codes
from ddprun.errors import Stopped

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_libc = ctypes.CDLL(None)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop this process: all STOP_SIGNALS, without SIGHUP under ``nohup``."""
    return [n for n in sorted(STOP_SIGNALS) if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def wakeup_pipe() -> int:
    """Return the end of a pipe to read; Python writes the number of each signal to it at once, in C."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


class StopFlag:
    """Set by a signal; a second SIGINT exits at once, as users at a terminal expect."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._phase: str | None = None

    @classmethod
    def installed(cls) -> "StopFlag":
        """Return a flag whose handlers are installed; only the main thread may call it."""
        flag = cls()
        for number in stop_signals():
            signal.signal(number, flag._on_signal)
        return flag

    def raise_if_requested(self, phase: str) -> None:
        """Raise if a signal came; for phases in which there is nothing to save.

        Raises:
            Stopped: with ``saved`` False.
        """
        if self.requested:
            raise Stopped(f"stopped by a signal in phase {phase}", saved=False)

    @contextlib.contextmanager
    def interruptible(self, phase: str) -> Iterator[None]:
        """Within this context a signal raises at once, for example in the middle of a slow download.

        Raises:
            Stopped: with ``saved`` False.
        """
        self._phase = phase
        try:
            self.raise_if_requested(phase)
            yield
        finally:
            self._phase = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            os._exit(exit_codes.SIGNAL_BASE + signal.SIGINT)
        if self._phase is not None:
            phase, self._phase = self._phase, None  # once: the cleanup must not be interrupted too
            self.raise_if_requested(phase)


class SignalQueue:
    """Collects the numbers of arriving signals; ``wakeup`` becomes readable when a signal arrives."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        for number in (*stop_signals(), signal.SIGCHLD):
            signal.signal(number, lambda n, _frame: self.pending.append(n))
        self.wakeup = wakeup_pipe()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends; exit now if it has already ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(exit_codes.SIGNAL_BASE + signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name of this process that ps and the kernel's log show."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of each descendant whose parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
