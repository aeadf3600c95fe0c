"""``--chaos ACTION:RANK:STEP[:PHASE]``: make one rank fail at one step, to test that a run recovers. A debugging aid.

``kill:1:7`` ends rank 1 by SIGKILL when it starts step 7; ``hang:0:5:save`` blocks rank 0 in its first save from step
5 on. The fault occurs once, in the first attempt of the job only, so the next attempt must finish.
"""

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddprun.errors import UsageError, volume_error
from ddprun.settings import Settings

ACTIONS = ("crash", "exit", "kill", "stop", "hang", "slow", "oom", "diskfull")
SLOW = 0.5  # seconds that ``slow`` adds to every step


@dataclass
class InjectedFault:
    """The action on ``rank`` when it starts ``phase`` of step ``step`` (counted from 1) or of a later one."""

    action: str
    rank: int
    step: int
    phase: str
    occurred: bool = False

    @classmethod
    def parse(cls, text: str, phase: str = "batch") -> "InjectedFault":
        """Return the fault in ``ACTION:RANK:STEP[:PHASE]``.

        Args:
            phase: the default.
        Raises:
            UsageError: the text does not have this form.
        """
        parts = text.split(":", 3)
        if len(parts) < 3 or parts[0] not in ACTIONS or not (parts[1].isdecimal() and parts[2].isdecimal()):
            raise UsageError(
                f"--chaos {text} is not ACTION:RANK:STEP[:PHASE]",
                hint=f"ACTION is one of {', '.join(ACTIONS)}; PHASE defaults to batch",
                next_step="for example --chaos kill:1:7",
            )
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3] if len(parts) > 3 else phase)

    def __call__(self, phase: str, step: int) -> None:
        """Act if it is time: once, but ``slow`` at every step from then on, and ``diskfull`` at every save.

        Raises:
            VolumeError: the volume is full, says ``diskfull``.
        """
        begins = not self.occurred and phase == self.phase and step >= self.step
        if begins:
            print(f"chaos: {self.action} in phase {phase} of step {step}", flush=True)
            self.occurred = True
        if self.action == "slow" and self.occurred and phase == self.phase:
            time.sleep(SLOW)
        elif self.action == "diskfull" and self.occurred and phase in ("resume", "save"):
            raise volume_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the volume")
        elif begins:
            _act(self.action)


def check_occurred(fault: InjectedFault | None) -> None:
    """Refuse a training that is finished without its fault: a test of recovery would prove nothing.

    Raises:
        UsageError: the fault did not occur.
    """
    if fault is not None and not fault.occurred:
        raise UsageError(
            f"--chaos did not occur: no phase {fault.phase} from step {fault.step} on was reached on rank {fault.rank}",
            hint="the training has fewer steps, or the name of the phase is wrong",
            next_step="name an earlier step, or a phase of docs/reference/trainer.md",
        )


def _act(action: str) -> None:
    if action == "crash":
        raise RuntimeError("crash injected by --chaos")
    if action == "exit":  # as a library does that takes a mistake for the end of the program
        os._exit(0)
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    if action == "hang":
        # In C, as in a collective: a mutex that is locked twice waits, and no signal handler ends the wait.
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        lock(mutex)
    if action == "oom":  # allocate until the kernel kills this process; for containers with a memory limit
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123 - not a file
            score.write("1000")
        blocks = []
        while True:
            blocks.append(b"\1" * 64 * 2**20)


def check_rank(settings: Settings, world_size: int, env: Mapping[str, str] = os.environ) -> None:
    """Refuse a fault of a rank that does not exist; a later attempt, which has no faults, may have fewer ranks.

    Raises:
        UsageError: there is no such rank.
    """
    if not settings.chaos or _is_later_attempt(env):
        return
    if (rank := InjectedFault.parse(settings.chaos).rank) >= world_size:
        raise UsageError(
            f"--chaos {settings.chaos} names rank {rank}, but there are {world_size} rank(s)",
            next_step=f"name a rank from 0 to {world_size - 1}",
        )


def planned(settings: Settings, rank: int, env: Mapping[str, str], phase: str = "batch") -> InjectedFault | None:
    """Return the fault to call at every heartbeat of ``rank``, or None if none is planned for it.

    Args:
        phase: the phase of the fault if the setting has none.
    """
    if not settings.chaos:
        return None
    fault = InjectedFault.parse(settings.chaos, phase)
    return None if fault.rank != rank or _is_later_attempt(env) else fault


def _is_later_attempt(env: Mapping[str, str]) -> bool:
    """Return whether the job has failed before: the operator counts from 1, torchrun counts restarts from 0."""
    return env.get("DDPJOB_ATTEMPT", "1") not in ("0", "1") or env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
