"""A thread in every rank that ends the rank in time when its main thread is blocked in C++.

Python runs signal handlers between two bytecodes of the main thread, so a SIGTERM that arrives inside a collective
would be handled only after it. The C-level handler writes each signal's number to a pipe at once, and this thread reads
that pipe. The watchdog exits without saving only if the main thread does not stop in time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.diagnostics import DUMP_SIGNAL, Diagnostics, dump_flight_recorder, register_stack_dump
from ddptrain.errors import Hang, Stopped
from ddptrain.heartbeat import BEFORE_TRAINING, Heartbeat, StallTimer, activity
from ddptrain.signals import STOP_SIGNALS, StopFlag

_NOTHING_TO_SAVE = 1.5  # seconds that the main thread has to exit by itself before training


@dataclass
class SelfWatchdog:
    """Watches the signals of this process, and its heartbeat if no launcher does.

    Attributes:
        terminate: called once, in the watchdog's thread, with the reason; it must end the process.
        grace: seconds from the stop signal to SIGKILL.
        diagnostics: where dumps are written; None without a launcher.
        hang_timeout: seconds without a heartbeat after which the rank ends itself; 0 to disable.
    """

    stop: StopFlag
    heartbeat: Heartbeat
    terminate: Callable[[Stopped | Hang], None]
    grace: float
    diagnostics: Diagnostics | None
    hang_timeout: float

    def __post_init__(self) -> None:
        self._interval = min(1.0, self.hang_timeout / 10) if self.hang_timeout else None
        self._stall = StallTimer(self._interval or 0.0)
        self._report = threading.Lock()
        self._pipe, self._write = os.pipe()

    def start(self) -> None:
        """Start watching; only the main thread may call it, after ``StopFlag.installed``."""
        for end in (self._pipe, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self.diagnostics:
            register_stack_dump(self.diagnostics)
        threading.Thread(target=self._watch, name="self-watchdog", daemon=True).start()

    def claim_report(self) -> bool:
        """Return True to the first caller only: either the main thread or the watchdog reports the end."""
        return self._report.acquire(blocking=False)

    def _watch(self) -> None:
        since: float | None = time.monotonic() if self.stop.requested else None
        while True:
            # After a stop signal the phase may change, and with it the time that is left: check often.
            ready, _, _ = select.select([self._pipe], [], [], 0.1 if since is not None else self._interval)
            if ready:
                signals = os.read(self._pipe, 4096)
                if since is None and STOP_SIGNALS & set(signals):
                    since = time.monotonic()
                    self.stop.requested = True
                if DUMP_SIGNAL in signals and self.diagnostics:
                    dump_flight_recorder(self.diagnostics)
            if since is not None:
                waited = time.monotonic() - since
                if waited >= self._time_to_exit() and self.claim_report():
                    record = self.heartbeat.last
                    where = activity(record.phase, record.collective)
                    self.terminate(Stopped(f"stopped by a signal {where}, unsaved after {waited:.0f} s", saved=False))
            elif self._hangs() and self.claim_report():
                with contextlib.suppress(Exception):  # stderr may be closed; the rank must end all the same
                    _print_stacks()
                self.terminate(self._hang())

    def _hangs(self) -> bool:
        if self._interval is None:
            return False
        record = self.heartbeat.last
        return self._stall.observe(record.changes) >= max(self.hang_timeout, record.limit)

    def _hang(self) -> Hang:
        record = self.heartbeat.last
        error = Hang(
            f"no heartbeat for {max(self.hang_timeout, record.limit):g} s "
            f"{activity(record.phase, record.collective)} of step {record.step}",
            hint="a peer has not reached this collective; see the other ranks' reports"
            if record.collective
            else "the stacks of this rank's threads are in its log, above",
        )
        error.cause = "peer" if record.collective else "own"
        return error

    def _time_to_exit(self) -> float:
        """Return the seconds from the stop signal after which the watchdog exits instead of the main thread."""
        limit = self.grace - min(3.0, 0.25 * self.grace)
        return min(_NOTHING_TO_SAVE, limit) if self.heartbeat.last.phase in BEFORE_TRAINING else limit


def _print_stacks() -> None:
    """Print all threads' stacks to stderr through Python, so that --log-format json applies to them."""
    stacks = os.memfd_create("ddptrain-stacks", os.MFD_CLOEXEC)
    faulthandler.dump_traceback(stacks)
    print(os.pread(stacks, 2**20, 0).decode(errors="replace"), file=sys.stderr, flush=True)
    os.close(stacks)
