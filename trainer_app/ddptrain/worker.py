"""One rank: its threads, progress port, process group, data and job. Every end becomes a report and an exit code.

``cli`` calls ``Worker.run_here`` for a rank without a launcher; the launcher's children call ``run_forked``.
"""

import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ddprun import fault_injection
from ddprun.checkpoint_files import checkpoint_file
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
from ddprun.resources import keep_freed_memory, threads_per_rank
from ddprun.self_watchdog import SelfWatchdog
from ddprun.signals import STOP_SIGNALS, StopFlag
from ddptrain.config import Config
from ddptrain.data import download
from ddptrain.data.mnist import Dataset
from ddptrain.device import resolve_backend, resolve_device, set_numerics, too_few_gpus, uses_bf16
from ddptrain.training import bitwise
from ddptrain.training.trainer import train


@dataclass
class Worker:
    """Runs one rank and reports how it ended.

    Attributes:
        infer: what the rank does in place of a training, called with its group and the timeout.
        diagnostics: where a launcher reads the heartbeat and the dumps; None without a launcher.
    """

    config: Config
    ranks: Ranks
    stop: StopFlag
    infer: Callable[[Group, float], str] | None = None
    diagnostics: Diagnostics | None = None

    def __post_init__(self) -> None:
        self.console = Console(self.ranks.rank)
        shared = self.diagnostics.progress_text() if self.diagnostics else None
        own = {"fenced": True, "accuracy": None, "data": self.config.data}
        self._progress = ProgressRecord(self.ranks.world_size, shared, own=own)
        memory = self.diagnostics.memory() if self.diagnostics else None
        self._fault = fault_injection.planned(self.config, self.ranks.rank, os.environ)
        self._heartbeat = Heartbeat(memory, self._fault)
        self._group: Group | None = None
        self._timeout = DEFAULT_TIMEOUT

    def run_here(self) -> int:
        """Run without a launcher, write the report, and return the exit code. Never raises."""
        return self.run(
            lambda report: termination.write(report, termination.destination(), shared=self.ranks.world_size > 1)
        )

    def run(self, deliver: Callable[[Report], None]) -> int:
        """Run, and return the exit code. Never raises.

        Args:
            deliver: takes the report, once; the watchdog may call it from its thread just before it ends the process.
        """

        def terminate(error: Stopped | Hang) -> None:
            try:
                deliver(self._failure(error))
            finally:
                os._exit(error.code)  # also if the report failed; the main thread, if it moves, waits for this

        watchdog = SelfWatchdog(
            self.stop, self._heartbeat, terminate, grace=self.config.stop_grace,
            hang_timeout=0.0 if self.diagnostics else self.config.hang_timeout,  # else the launcher watches it
        )  # fmt: skip
        watchdog.start()
        if self.diagnostics:
            dump_stacks_on_signal(self.diagnostics)
            dump_on_request(self.diagnostics)
        gc.freeze()  # collections skip what is imported by now: releasing DDP took 180 ms of CPU, and takes 20 ms
        try:
            report = self._train() if self.infer is None else self._infer(self.infer)
        except BaseException as error:
            report = self._failure(error)
            if self._group:
                self._group.announce_exit(str(error))
        if not watchdog.claim_report():
            threading.Event().wait()  # the watchdog is reporting and ends the process
        deliver(report)
        return int(report["code"])

    def _join(self, next_phase: str) -> Group:
        """Set up device, threads and progress port, join the process group, and begin ``next_phase``."""
        config, ranks = self.config, self.ranks
        self.stop.raise_if_requested("start")  # a signal may have come while torch was imported
        device = resolve_device(config, ranks)
        if device.type == "cpu" and (reason := too_few_gpus(config, ranks)):
            self.console.log(reason)
        set_numerics(config)
        backend = resolve_backend(config.backend, device)
        keep_freed_memory()
        threads = config.threads or (bitwise.THREADS if config.sync == "bitwise" else 0)
        torch.set_num_threads(threads or threads_per_rank(ranks.nproc_per_node))
        uses_bf16(config, device)  # raises, before any rank is waited for, if it is impossible
        port = os.environ.get("DDPJOB_PROGRESS_PORT", "")
        if ranks.is_zero and port.isdecimal() and not self.diagnostics:  # else the launcher answers
            try:
                self._progress.serve(int(port), loopback_of(ranks.master_addr))
            except (OSError, OverflowError) as error:
                self.console.log(f"warning: no progress on port {port}: {error}")
        self._timeout = config.rendezvous_timeout or parse_rendezvous_timeout(os.environ.get("PET_RDZV_CONF", ""))
        if config.sync == "ddp":
            importlib.import_module("torch._dynamo")  # DDP does it, and once the group exists, it would keep the group
        self._begin("rendezvous")
        self._group = join_group(
            ranks, device, backend,
            rendezvous_timeout=self._timeout, collective_timeout=config.collective_timeout, stop=self.stop,
            heartbeat=self._heartbeat, also_alone=config.backend != "auto",
        )  # fmt: skip
        self._begin(next_phase)
        return self._group

    def _infer(self, infer: Callable[[Group, float], str]) -> Report:
        group = self._join("infer")
        done = infer(group, self._timeout)
        self.console.log(done)
        group.close()
        return termination.done(done, rank=self.ranks.rank)

    def _train(self) -> Report:
        config, ranks = self.config, self.ranks
        group = self._join("data")
        dataset = group.run_on_all_ranks("data", self._load_data, self._timeout)
        # Nodes may differ. After the data: until then ranks wait in the store, which names a rank that failed.
        bf16 = all(group.gather(uses_bf16(config, group.device), "all_gather of bfloat16"))
        device = group.device.type
        where = f"{resolve_backend(config.backend, group.device)} on {device}" if group.has_process_group else device
        self.console.log(
            f"ddptrain: {ranks.world_size} rank(s) on {ranks.nnodes} node(s), {where}, "
            f"{torch.get_num_threads()} thread(s) each{', bfloat16' if bf16 else ''}; "
            f"{dataset.name}: {len(dataset.train_labels):,} samples, global batch {config.global_batch}, "
            f"{config.epochs} epoch(s)"
        )
        result = train(config, dataset, group, bf16=bf16, progress=self._progress, console=self.console, stop=self.stop)
        accuracy, loss, place = result.evaluation["accuracy"], result.evaluation["loss"], result.checkpoint
        self._progress.update(phase="done", accuracy=accuracy, checkpoint=place)
        group.close()
        if not result.already_finished:
            fault_injection.check_occurred(self._fault)
        message = f"{'already finished' if result.already_finished else 'finished'}: test accuracy {accuracy:.4f}"
        file = checkpoint_file(Path(config.checkpoint_dir), place["run"], place["step"]) if place else None
        saved = f"; checkpoint {file}" if file else ""
        self.console.log(f"{message}, loss {loss:.4f}{saved}")
        outcome = "already finished" if result.already_finished else "succeeded"
        return termination.done(
            message, rank=ranks.rank, outcome=outcome, accuracy=accuracy, loss=loss, checkpoint=place,
            resumedFrom=result.resumed_from, progress=self._progress.snapshot(),
        )  # fmt: skip

    def _begin(self, phase: str) -> None:
        self._progress.update(phase=phase)
        self._heartbeat.mark(phase)

    def _load_data(self) -> Dataset:
        with self.stop.interruptible("data"):
            return download.load(self.config, log=self.console.log, alive=self._heartbeat.touch)

    def _failure(self, error: BaseException) -> Report:
        typed = classify(error)
        if isinstance(typed, TrainerError):
            print(typed.lines(), file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        place = self._progress.snapshot() | {"exact": True}
        return termination.failure(error, rank=self.ranks.rank, progress=place)


def run_forked(config: Config, rank: RankProcess) -> int:
    """Run one rank in a child of the launcher and return its exit code."""

    def deliver(report: Report) -> None:
        with os.fdopen(rank.reports, "wb") as pipe:
            pipe.write(dumps_json(report).encode())

    # The runtime of CUDA does not survive a fork; the launcher must not have initialized it.
    assert not torch.cuda._is_in_bad_fork(), "CUDA was initialized before the fork"
    stop = StopFlag.installed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked until now by the launcher
    return Worker(config, rank.ranks, stop, diagnostics=rank.diagnostics).run(deliver)
