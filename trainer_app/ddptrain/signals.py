"""SIGTERM, SIGINT and SIGHUP become a flag; who acts on it depends on the phase.

Installed by ``cli`` before anything slow: as PID 1 of a container a process has no default action for SIGTERM, and
would sleep through it. Before training a rank may leave alone (``raise_if_requested``, ``interruptible``). In training
the flag rides in the metrics vector of ``sync``, so that all ranks leave after the same step: one that left alone would
strand the others in a collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import FrameType

from ddptrain import exit_codes
from ddptrain.errors import Stopped

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def stop_signals() -> list[signal.Signals]:
    """The signals that tell this process to stop; a terminal that closes does not where ``nohup`` saw to that."""
    return [n for n in sorted(STOP_SIGNALS) if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class StopFlag:
    """Set by a signal; a second SIGINT leaves at once, as a person at a terminal expects."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._phase: str | None = None

    def install(self) -> None:
        """Take over the signals; only the main thread may."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def raise_if_requested(self, phase: str) -> None:
        """Raise if a signal came, in a phase where nothing needs saving.

        Raises:
            Stopped: with ``saved`` False.
        """
        if self.requested:
            raise Stopped(f"stopped by a signal in phase {phase}", saved=False)

    @contextlib.contextmanager
    def interruptible(self, phase: str) -> Iterator[None]:
        """Inside, a signal raises where it finds the program, be it in the middle of a slow download.

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
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(exit_codes.SIGNAL_BASE + signal.SIGINT)
        if self._phase is not None:
            phase, self._phase = self._phase, None  # once: what cleans up after it must not be interrupted too
            self.raise_if_requested(phase)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends; exit now if it has already ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(exit_codes.SIGNAL_BASE + signal.SIGKILL)
