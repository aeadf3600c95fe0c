"""A thread in every rank that still acts when the main thread is blocked in C++: it ends the rank in time.

Python runs signal handlers between two bytecodes of the main thread, so a SIGTERM that arrives inside a collective
would be seen only after it. The C-level handler, however, writes each signal's number to a pipe at once; this thread
reads it. ``stop`` remains the polite way: the guard leaves, unsaved, only where politeness found no ear.
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

from ddptrain.errors import Hang, Stopped
from ddptrain.heartbeat import (
    BEFORE_TRAINING,
    DUMP_SIGNAL,
    Diagnostics,
    Heartbeat,
    StallTimer,
    dump_flight_recorder,
    register_stack_dump,
)
from ddptrain.signals import STOP_SIGNALS, StopFlag

_PATIENCE = 1.5  # seconds for the main thread to leave by itself where nothing could be saved anyway


def exit_margin(grace: float) -> float:
    """Seconds before the end of the grace at which a rank that still has not left is made to."""
    return min(3.0, 0.25 * grace)


class SelfWatchdog:
    """Watches the signals of this process.

    Args:
        leave: called once, from the guard's thread, with what ends this rank; it must end the process.
        grace: seconds from the signal to SIGKILL.
        diagnostics: where dumps go; None without a launcher.
        hang_timeout: seconds without a breadcrumb after which the rank ends itself; 0 where a launcher sees to it.
    """

    def __init__(
        self,
        stop: StopFlag,
        heartbeat: Heartbeat,
        leave: Callable[[Stopped | Hang], None],
        *,
        grace: float,
        diagnostics: Diagnostics | None,
        hang_timeout: float = 0.0,
    ) -> None:
        self._stop, self._heartbeat, self._leave, self._diagnostics = stop, heartbeat, leave, diagnostics
        self._grace, self._hang_timeout = grace, hang_timeout
        self._stillness = StallTimer(self._interval or 0.0)
        self._last_word = threading.Lock()
        self._pipe, self._write = os.pipe()

    def start(self) -> None:
        """Begin to watch; only the main thread may call it, after ``StopFlag.install``."""
        for end in (self._pipe, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self._diagnostics:
            register_stack_dump(self._diagnostics)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def claim_report(self) -> bool:
        """True for the first who asks, main thread or guard: one of them reports the end, the other keeps still."""
        return self._last_word.acquire(blocking=False)

    def _watch(self) -> None:
        since: float | None = time.monotonic() if self._stop.requested else None
        while True:
            # A phase may change while we wait, and with it the moment to leave: look again soon.
            pause = 0.1 if since is not None else self._interval
            ready, _, _ = select.select([self._pipe], [], [], pause)
            if ready:
                signals = os.read(self._pipe, 4096)
                if since is None and STOP_SIGNALS & set(signals):
                    since = time.monotonic()
                    self._stop.requested = True
                if DUMP_SIGNAL in signals and self._diagnostics:
                    dump_flight_recorder(self._diagnostics.flight)
            if since is not None:
                waited = time.monotonic() - since
                if waited >= self._patience() and self.claim_report():
                    where = self._heartbeat.last.doing
                    self._leave(Stopped(f"stopped by a signal {where}, unsaved after {waited:.0f} s", saved=False))
            elif self._hangs() and self.claim_report():
                with contextlib.suppress(Exception):  # stderr may be closed; that must not save a rank that hangs
                    _print_stacks()
                self._leave(self._hang())

    @property
    def _interval(self) -> float | None:
        return min(1.0, self._hang_timeout / 10) if self._hang_timeout else None

    def _hangs(self) -> bool:
        if self._interval is None:
            return False
        return self._stillness.look(self._heartbeat.last.changes) >= self._hang_timeout

    def _hang(self) -> Hang:
        crumb = self._heartbeat.last
        error = Hang(
            f"no sign of life for {self._hang_timeout:g} s {crumb.doing} of step {crumb.step}",
            hint="the peers that this rank waits for know more" if crumb.collective else "the stacks are above",
        )
        error.cause = "peer" if crumb.collective else "own"
        return error

    def _patience(self) -> float:
        most = self._grace - exit_margin(self._grace)
        return min(_PATIENCE, most) if self._heartbeat.last.phase in BEFORE_TRAINING else most


def _print_stacks() -> None:
    """All threads' stacks to stderr, as Python prints, so that they are objects where lines are."""
    stacks = os.memfd_create("ddptrain-stacks", os.MFD_CLOEXEC)
    faulthandler.dump_traceback(stacks)
    print(os.pread(stacks, 2**20, 0).decode(errors="replace"), file=sys.stderr, flush=True)
    os.close(stacks)
