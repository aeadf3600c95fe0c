"""Failures on order, at one rank and one step, to see a run survive them: a debugging aid.

``--chaos kill:1:7`` ends rank 1 by SIGKILL as it begins step 7; ``hang:0:5:evaluate`` blocks rank 0 at its first
evaluation from step 5 on. It strikes once, in the first life of the job only: the life after it must run through.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddptrain import files
from ddptrain.config import Config
from ddptrain.errors import UsageError

ACTIONS = ("crash", "kill", "stop", "hang", "slow", "oom", "diskfull")
SLOW = 0.5  # seconds that ``slow`` adds to every step
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Plan:
    """What shall happen to which rank, as it begins ``phase`` of step ``step`` (counting from 1) or of a later one."""

    action: str
    rank: int
    step: int
    phase: str

    @classmethod
    def parse(cls, text: str) -> Plan:
        """``ACTION:RANK:STEP[:PHASE]``.

        Raises:
            UsageError: it is not of this form.
        """
        parts = text.split(":", 3)
        if len(parts) < 3 or parts[0] not in ACTIONS or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise UsageError(
                f"--chaos {text} is not ACTION:RANK:STEP[:PHASE]",
                hint=f"ACTION is one of {', '.join(ACTIONS)}; PHASE is batch if not given",
                next_step="for example --chaos kill:1:7",
            )
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3] if len(parts) > 3 else "batch")


def planned(config: Config, rank: int, env: Mapping[str, str]) -> Callable[[str, int], None] | None:
    """What to call at every breadcrumb of ``rank``; None if nothing is to happen to it in this life."""
    if not config.chaos:
        return None
    plan = Plan.parse(config.chaos)
    # The operator counts attempts from 1, torchrun its restarts from 0.
    is_later = env.get("DDPJOB_ATTEMPT", "1") not in ("0", "1") or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if plan.rank != rank or is_later:
        return None
    return _Striker(plan)


class _Striker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._struck = self._told = False

    def __call__(self, phase: str, step: int) -> None:
        if phase != self._plan.phase or step < self._plan.step or self._struck:
            return
        if not self._told:
            print(f"chaos: {self._plan.action} in phase {phase} of step {step}", flush=True)
        self._told, self._struck = True, self._plan.action != "slow"
        getattr(self, f"_{self._plan.action}")()

    def _crash(self) -> None:
        raise RuntimeError("chaos: a crash was ordered")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _hang(self) -> None:
        """As blocked as inside a collective: a mutex locked twice waits in C, and no signal handler ends that."""
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        lock(mutex)

    def _slow(self) -> None:
        time.sleep(SLOW)

    def _oom(self) -> None:
        """Ask the kernel to choose us, then take memory until it does. Meant for a container with a memory limit."""
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 - not a file
            score.write("1000")
        taken = []
        while True:
            taken.append(b"\1" * _PIECE)

    def _diskfull(self) -> None:
        files.refusal = errno.ENOSPC
