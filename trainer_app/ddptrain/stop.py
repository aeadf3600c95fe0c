"""SIGTERM and SIGINT become a flag; who acts on it depends on the phase.

Before training a rank may leave alone (``leave_if_requested``). In training the flag rides in the metrics vector of
``sync``, so that all ranks leave after the same step: one that left alone would strand the others in a collective.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from ddptrain.errors import Stopped


class StopFlag:
    """Set by a signal; a second SIGINT leaves at once, as a person at a terminal expects."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; only the main thread may."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def leave_if_requested(self, phase: str) -> None:
        """Raise if a signal came, in a phase where nothing needs saving.

        Raises:
            Stopped: with ``saved`` False.
        """
        if self.requested:
            raise Stopped(f"stopped by a signal in phase {phase}", saved=False)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + signal.SIGINT)
