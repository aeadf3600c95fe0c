"""A thread in every rank that ends the rank in time when its main thread is blocked in C++.

Python runs signal handlers between two bytecodes of the main thread, so a SIGTERM that arrives inside a collective
would be handled only after it. The C-level handler writes each signal's number to a pipe at once, and this thread reads
that pipe. The watchdog exits without saving only if the main thread does not stop in time.
"""

import contextlib
import faulthandler
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddprun.errors import Hang, Stopped
from ddprun.heartbeat import BEFORE_TRAINING, Heartbeat, StallTimer, activity
from ddprun.signals import STOP_SIGNALS, StopFlag, wakeup_pipe

_NOTHING_TO_SAVE = 1.5  # seconds that the main thread has to exit by itself before training


@dataclass
class SelfWatchdog:
    """Watches the signals of this process, and its heartbeat if no launcher does.

    Attributes:
        terminate: called once, in the watchdog's thread, with the reason; it must end the process.
        grace: seconds from the stop signal to SIGKILL.
        hang_timeout: seconds without a heartbeat after which the rank ends itself; 0 to disable.
    """

    stop: StopFlag
    heartbeat: Heartbeat
    terminate: Callable[[Stopped | Hang], None]
    grace: float
    hang_timeout: float

    def __post_init__(self) -> None:
        self._interval = min(1.0, self.hang_timeout / 10) if self.hang_timeout else None
        self._stall = StallTimer(self._interval or 0.0)
        self._report = threading.Lock()

    def start(self) -> None:
        """Start watching; only the main thread may call it, after ``StopFlag.installed``."""
        pipe = wakeup_pipe()
        threading.Thread(target=self._watch, args=(pipe,), name="self-watchdog", daemon=True).start()

    def claim_report(self) -> bool:
        """Return True to the first caller only: either the main thread or the watchdog reports the end."""
        return self._report.acquire(blocking=False)

    def _watch(self, pipe: int) -> None:
        since: float | None = time.monotonic() if self.stop.requested else None
        while True:
            # After a stop signal the phase may change, and with it the time that is left: check often.
            ready, _, _ = select.select([pipe], [], [], 0.1 if since is not None else self._interval)
            if ready:
                signals = os.read(pipe, 4096)
                if since is None and STOP_SIGNALS & set(signals):
                    since = time.monotonic()
                    self.stop.requested = True
            if since is not None:
                self._check_stop(time.monotonic() - since)
            elif self._interval is not None:
                self._check_progress()

    def _check_stop(self, waited: float) -> None:
        record, limit = self.heartbeat.last, self.grace - min(3.0, 0.25 * self.grace)
        if record.phase in BEFORE_TRAINING:
            limit = min(_NOTHING_TO_SAVE, limit)
        if waited >= limit and self.claim_report():
            where = activity(record.phase, record.collective)
            self.terminate(Stopped(f"stopped by a signal {where}, unsaved after {waited:.0f} s", saved=False))

    def _check_progress(self) -> None:
        record = self.heartbeat.last
        limit = max(self.hang_timeout, record.limit)
        if self._stall.observe(record.changes) < limit or not self.claim_report():
            return
        with contextlib.suppress(Exception):  # stderr may be closed; the rank must end all the same
            stacks = os.memfd_create("ddprun-stacks", os.MFD_CLOEXEC)
            faulthandler.dump_traceback(stacks)  # then printed by Python, which never waits for a reader
            print(os.pread(stacks, 2**20, 0).decode(errors="replace"), file=sys.stderr, flush=True)
        error = Hang(
            f"no heartbeat for {limit:g} s {activity(record.phase, record.collective)} of step {record.step}",
            hint="a peer has not reached this collective; see the other ranks' reports"
            if record.collective
            else "the stacks of this rank's threads are in its log, above",
        )
        error.cause = "peer" if record.collective else "own"
        self.terminate(error)
