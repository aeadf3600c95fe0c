"""One rank's life: threads, progress port, group, data, training; every end of it becomes a report and an exit code.

``entry`` runs it, in this very process or in a child of the launcher.

Where a rank's life begins, once torch may be imported: in this very process, or in a child of the launcher.

``cli`` calls ``run_here`` (alone, under torchrun, or by hand), ``children`` calls ``run_forked``; both say where the
report goes.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ddptrain import fault_injection as chaos
from ddptrain.config import Config
from ddptrain.data import download as fetch
from ddptrain.data import mnist
from ddptrain.distributed import process_group as group
from ddptrain.distributed.device import resolve_backend, resolve_device
from ddptrain.distributed.rendezvous import DEFAULT_TIMEOUT, parse_rendezvous_timeout
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import Hang, RanksError, Stopped, TrainerError, classify
from ddptrain.files import dumps
from ddptrain.heartbeat import Diagnostics, Heartbeat
from ddptrain.reporting import termination
from ddptrain.reporting.console import Console
from ddptrain.reporting.progress import Progress
from ddptrain.resources import keep_freed_memory, threads_per_rank
from ddptrain.self_watchdog import SelfWatchdog
from ddptrain.signals import STOP_SIGNALS, StopFlag
from ddptrain.training import bitwise
from ddptrain.training.trainer import Result, Trainer

if TYPE_CHECKING:
    from ddptrain.inference import Wanted


class Worker:
    """Runs one rank and remembers enough to say how it ended.

    Args:
        job: train, preflight, or infer, which needs to know what is ``wanted``.
        diagnostics: where a launcher reads breadcrumbs and dumps; None without one.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        console: Console,
        stop: StopFlag,
        *,
        job: str = "train",
        wanted: Wanted | None = None,
        diagnostics: Diagnostics | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._config, self._ranks, self._console, self._stop, self._env = config, ranks, console, stop, env
        self._progress = Progress(ranks.world_size, config.data)
        self._heartbeat = Heartbeat(
            diagnostics.memory() if diagnostics else None, chaos.planned(config, ranks.rank, env)
        )
        self._job, self._wanted, self._diagnostics = job, wanted, diagnostics
        self._group: group.Group | None = None
        self._timeout, self._on = DEFAULT_TIMEOUT, ""

    def run(self, deliver: Callable[[termination.Report], None]) -> int:
        """Do the job; never raises. Returns the exit code.

        Args:
            deliver: takes the report, once; perhaps from the guard's thread, which ends the process after it.
        """

        def leave(error: Stopped | Hang) -> None:
            try:
                deliver(self._failure(error))
            finally:
                os._exit(error.code)  # whatever became of the report: the main thread, if it moves, waits for this

        alone = self._diagnostics is None and sys.gettrace() is None  # no launcher above, no debugger inside
        guard = SelfWatchdog(
            self._stop, self._heartbeat, leave, grace=self._config.stop_grace, diagnostics=self._diagnostics,
            hang_timeout=self._config.hang_timeout if alone else 0.0,
        )  # fmt: skip
        guard.start()
        gc.freeze()  # collections skip what is imported by now: releasing DDP took 180 ms of CPU, and takes 20 ms
        try:
            report = {"train": self._train, "preflight": self._preflight, "infer": self._infer}[self._job]()
        except BaseException as error:
            if self._group:
                self._group.announce_exit(str(error))
            report = self._failure(error)
        if not guard.claim_report():
            threading.Event().wait()  # the guard is speaking, and ends the process
        deliver(report)
        return int(report["code"])

    def _join(self) -> group.Group:
        """Device, threads, progress port, and the other ranks."""
        config, ranks = self._config, self._ranks
        self._stop.raise_if_requested("start")  # one may have come while torch was imported
        device = resolve_device(config, ranks)
        backend = resolve_backend(config.backend, device)
        keep_freed_memory()
        fixed = bitwise.THREADS if config.sync == "bitwise" else 0
        torch.set_num_threads(config.threads or fixed or threads_per_rank(ranks.nproc_per_node, self._env))
        if config.bf16 and device.type != "cuda":
            raise RanksError("--bf16 needs CUDA", next_step="leave --bf16 out on a CPU")
        self._serve_progress()
        self._timeout = config.rendezvous_timeout or parse_rendezvous_timeout(self._env.get("PET_RDZV_CONF", ""))
        self._begin("rendezvous")
        self._group = group.join(
            ranks,
            device,
            backend,
            rendezvous_timeout=self._timeout,
            collective_timeout=config.collective_timeout,
            stop=self._stop,
            heartbeat=self._heartbeat,
            env=self._env,
        )
        self._on = f"{ranks.world_size} rank(s) on {ranks.nnodes} node(s), {backend} on {device.type}"
        return self._group

    def _preflight(self) -> termination.Report:
        from ddptrain.preflight import preflight

        members = self._join()
        self._begin("preflight")
        found = preflight(self._config, members, self._load_data)
        members.close()
        return termination.preflighted(found, rank=self._ranks.rank, node=self._ranks.node_rank)

    def _infer(self) -> termination.Report:
        from ddptrain.inference import infer

        assert self._wanted is not None
        members = self._join()
        self._begin("infer")
        done = infer(self._config, members, self._wanted, self._timeout)
        self._console.say(done)
        members.close()
        return termination.done(done, rank=self._ranks.rank)

    def _train(self) -> termination.Report:
        config = self._config
        members = self._join()
        self._begin("data")
        dataset = members.run_on_all_ranks("data", self._load_data, self._timeout)
        self._console.say(
            f"ddptrain: {self._on}, "
            f"{torch.get_num_threads()} thread(s) each; {dataset.name}: {len(dataset.train_labels):,} samples, "
            f"global batch {config.global_batch}, {config.epochs} epoch(s)"
        )
        trainer = Trainer(config, dataset, members, progress=self._progress, console=self._console, stop=self._stop)
        result = trainer.run()
        self._progress.update(phase="done", accuracy=result.evaluation["accuracy"], checkpoint=result.checkpoint)
        members.close()
        return self._success(result)

    def _begin(self, phase: str) -> None:
        self._progress.update(phase=phase)
        self._heartbeat.mark(phase)

    def _load_data(self) -> mnist.Dataset:
        with self._stop.interruptible("data"):
            return fetch.load(self._config, say=self._console.say, alive=self._heartbeat.touch)

    def _serve_progress(self) -> None:
        port = self._env.get("DDPJOB_PROGRESS_PORT", "")
        if not self._ranks.is_zero or not port.isdecimal():
            return
        try:
            self._progress.serve(int(port))
        except (OSError, OverflowError) as error:
            self._console.say(f"warning: no progress on port {port}: {error}")

    def _success(self, result: Result) -> termination.Report:
        accuracy = result.evaluation["accuracy"]
        what = "already finished" if result.already_finished else "finished"
        place = result.checkpoint
        kept = (
            f"; checkpoint {self._config.checkpoint_dir}/run-{place['run']:06d}/step-{place['step']:09d}.pt"
            if place
            else ""
        )
        self._console.say(f"{what}: test accuracy {accuracy:.4f}, loss {result.evaluation['loss']:.4f}{kept}")
        return termination.success(
            result.evaluation,
            rank=self._ranks.rank,
            before=result.already_finished,
            checkpoint=place,
            resumed_from=result.resumed_from,
            progress=self._progress.snapshot(),
        )

    def _failure(self, error: BaseException) -> termination.Report:
        typed = classify(error)
        if isinstance(typed, TrainerError):
            print(typed.lines(), file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        return termination.failure(error, rank=self._ranks.rank, progress=self._progress.snapshot())


def run_here(
    config: Config,
    ranks: Ranks,
    console: Console,
    stop: StopFlag,
    *,
    job: str = "train",
    wanted: Wanted | None = None,
    tell: Callable[[termination.Report], None] = lambda report: None,
) -> int:
    """Do the job in this process, with no launcher above: alone, under torchrun, or by hand. Returns the exit code.

    Args:
        job, wanted: see Worker.
        tell: also takes the report.
    """

    def deliver(report: termination.Report) -> None:
        termination.write(report, termination.destination(), shared=ranks.world_size > 1)
        tell(report)

    code = Worker(config, ranks, console, stop, job=job, wanted=wanted).run(deliver)
    if code and ranks.world_size > 1:
        # The group was left in the middle of something: its destructor could wait for peers that never come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run_forked(
    config: Config, ranks: Ranks, console: Console, *, job: str, diagnostics: Diagnostics, reports: int
) -> int:
    """Run one rank in a child of the launcher and return its exit code.

    Args:
        reports: the pipe on which the launcher reads the report.
    """

    def deliver(report: termination.Report) -> None:
        with os.fdopen(reports, "wb") as pipe:
            pipe.write(dumps(report).encode())

    stop = StopFlag()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked until now by the launcher
    return Worker(config, ranks, console, stop, job=job, diagnostics=diagnostics).run(deliver)
