"""One rank of a program that reports its own end: its heartbeat, progress, watchdog, process group and report.

A program of its own calls ``run_here``; a rank that the launcher has forked, ``run_forked``. A user's script is run by
``script``.
"""

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddprun import fault_injection
from ddprun.diagnostics import Diagnostics, dump_on_request, dump_stacks_on_signal
from ddprun.distributed.process_group import Group, join_group
from ddprun.distributed.rendezvous import DEFAULT_TIMEOUT, parse_rendezvous_timeout
from ddprun.distributed.topology import Ranks, loopback_of
from ddprun.errors import Hang, Stopped, TrainerError, classify
from ddprun.files import dumps_json
from ddprun.heartbeat import Heartbeat
from ddprun.program import RankProcess
from ddprun.reporting import termination
from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddprun.reporting.termination import Report
from ddprun.self_watchdog import SelfWatchdog
from ddprun.settings import Settings
from ddprun.signals import STOP_SIGNALS, StopFlag
from ddprun.step_profile import StepProfiler


def _profiled(profiler: StepProfiler, fault: Callable[[str, int], None] | None) -> Callable[[str, int], None]:
    """Return what takes note of each mark, of a new step for profiles: the optimizer may be none of torch.optim."""
    last = 0

    def mark(place: str, step: int) -> None:
        nonlocal last
        if step != last:
            last = step
            profiler.turn(lambda: step)
        if fault:
            fault(place, step)

    return mark


class RankRun:
    """One run of a rank; every end becomes a report and an exit code.

    Args:
        diagnostics: where a launcher reads the heartbeat and the dumps; None without a launcher.
        own: the fields of the progress report that only this program has.
    Attributes:
        timeout: seconds that ranks wait for each other before the training; known after ``join``.
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, stop: StopFlag, diagnostics: Diagnostics | None = None,
        *, own: Mapping[str, Any],
    ) -> None:  # fmt: skip
        # The runtime of CUDA does not survive a fork; the launcher must not have initialized it.
        assert not torch.cuda._is_in_bad_fork(), "CUDA was initialized before the fork"
        self.settings, self.ranks, self.stop, self.diagnostics = settings, ranks, stop, diagnostics
        self.console = Console(ranks.rank)
        self.progress = ProgressRecord(ranks.world_size, diagnostics.progress_text() if diagnostics else None, own=own)
        self.fault = fault_injection.planned(settings, ranks.rank, os.environ)
        on_mark: Callable[[str, int], None] | None = self.fault
        if diagnostics:
            profiler = StepProfiler(diagnostics.profile, lambda: self.heartbeat.touch())  # noqa: PLW0108 - see below
            on_mark = _profiled(profiler, self.fault)
        self.heartbeat = Heartbeat(diagnostics.memory() if diagnostics else None, on_mark)
        self.timeout = DEFAULT_TIMEOUT
        self._group: Group | None = None

    def run_here(self, work: Callable[[], Report]) -> int:
        """Run without a launcher, write the report, and return the exit code. Never raises."""
        shared = self.ranks.world_size > 1
        return self.run(work, lambda report: termination.write(report, termination.destination(), shared=shared))

    def run_forked(self, work: Callable[[], Report], rank: RankProcess) -> int:
        """Run in a child of the launcher, send the report to it, and return the exit code. Never raises."""

        def deliver(report: Report) -> None:
            with os.fdopen(rank.reports, "wb") as pipe:
                pipe.write(dumps_json(report).encode())

        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked until now by the launcher
        return self.run(work, deliver)

    def run(self, work: Callable[[], Report], deliver: Callable[[Report], None]) -> int:
        """Run ``work``, which returns the report of its success, and return the exit code. Never raises.

        Args:
            deliver: takes the report, once; the watchdog may call it from its thread just before it ends the process.
        """

        def terminate(error: Stopped | Hang) -> None:
            try:
                deliver(self._failure(error))
            finally:
                os._exit(error.code)  # also if the report failed; the main thread, if it moves, waits for this

        watchdog = SelfWatchdog(
            self.stop, self.heartbeat, terminate, grace=self.settings.stop_grace,
            hang_timeout=0.0 if self.diagnostics else self.settings.hang_timeout,  # else the launcher watches it
        )  # fmt: skip
        watchdog.start()
        if self.diagnostics:
            dump_stacks_on_signal(self.diagnostics)
            dump_on_request(self.diagnostics)
        gc.freeze()  # collections skip what is imported by now: releasing DDP took 180 ms of CPU, and takes 20 ms
        try:
            report = work()
        except BaseException as error:
            report = self._failure(error)
            if self._group:
                self._group.announce_exit(str(error))
        if not watchdog.claim_report():
            threading.Event().wait()  # the watchdog is reporting and ends the process
        deliver(report)
        return int(report["code"])

    def join(
        self, device: torch.device, backend: str, *,
        rendezvous_timeout: float, collective_timeout: float, also_alone: bool,
    ) -> Group:  # fmt: skip
        """Serve the progress, unless a launcher does, and join the process group; as ``join_group``.

        Args:
            rendezvous_timeout: 0 for that of PET_RDZV_CONF.
        """
        ranks, port = self.ranks, os.environ.get("DDPJOB_PROGRESS_PORT", "")
        if ranks.is_zero and port.isdecimal() and not self.diagnostics:  # else the launcher answers
            try:
                self.progress.serve(int(port), loopback_of(ranks.master_addr))
            except (OSError, OverflowError) as error:
                self.console.log(f"warning: no progress on port {port}: {error}")
        self.timeout = rendezvous_timeout or parse_rendezvous_timeout(os.environ.get("PET_RDZV_CONF", ""))
        self.begin("rendezvous")
        self._group = join_group(
            ranks, device, backend, rendezvous_timeout=self.timeout, collective_timeout=collective_timeout,
            stop=self.stop, heartbeat=self.heartbeat, also_alone=also_alone,
        )  # fmt: skip
        return self._group

    def begin(self, phase: str) -> None:
        """Begin a phase, in the progress report and the heartbeat."""
        self.progress.update(phase=phase)
        self.heartbeat.mark(phase)

    def _failure(self, error: BaseException) -> Report:
        typed = classify(error)
        if isinstance(typed, TrainerError):
            print(typed.lines(), file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        place = self.progress.snapshot() | {"exact": True}
        return termination.failure(error, rank=self.ranks.rank, progress=place)
