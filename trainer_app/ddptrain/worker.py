"""One rank of a training: its device, threads and data, then the training itself. ``ddprun.rank_run`` runs it."""

import importlib
from pathlib import Path

import torch

from ddprun import fault_injection
from ddprun.checkpoint_files import checkpoint_file
from ddprun.diagnostics import Diagnostics
from ddprun.distributed.process_group import Group
from ddprun.distributed.topology import Ranks
from ddprun.rank_run import RankRun
from ddprun.reporting import termination
from ddprun.reporting.termination import Report
from ddprun.resources import keep_freed_memory, threads_per_rank
from ddprun.signals import StopFlag
from ddptrain.config import Config
from ddptrain.data import download
from ddptrain.data.mnist import Dataset
from ddptrain.device import resolve_backend, resolve_device, set_numerics, too_few_gpus, uses_bf16
from ddptrain.training import bitwise
from ddptrain.training.trainer import Training


class Worker:
    """One rank of a training; ``train`` is what it does."""

    def __init__(self, config: Config, ranks: Ranks, stop: StopFlag, diagnostics: Diagnostics | None = None) -> None:
        self._config, self._ranks = config, ranks
        own = {"fenced": True, "accuracy": None, "data": config.data}
        self.run = RankRun(config, ranks, stop, diagnostics, own=own)

    def train(self) -> Report:
        """Train, and return the report of a success."""
        config, run = self._config, self.run
        group = self._join()
        run.begin("data")
        dataset = group.run_on_all_ranks("data", self._load_data, run.timeout)
        # Nodes may differ. After the data: until then ranks wait in the store, which names a rank that failed.
        bf16 = all(group.gather(uses_bf16(config, group.device), "all_gather of bfloat16"))
        self._describe(group, dataset, bf16=bf16)
        training = Training(config, dataset, group, run.stop, bf16=bf16, progress=run.progress, console=run.console)
        result = training.run()
        accuracy, loss, place = result.evaluation["accuracy"], result.evaluation["loss"], result.checkpoint
        run.progress.update(phase="done", accuracy=accuracy, checkpoint=place)
        group.close()
        if not result.already_finished:
            fault_injection.check_occurred(run.fault)
        outcome, said = ("already finished",) * 2 if result.already_finished else ("succeeded", "finished")
        message = f"{said}: test accuracy {accuracy:.4f}"
        file = checkpoint_file(Path(config.checkpoint_dir), place["run"], place["step"]) if place else None
        run.console.log(f"{message}, loss {loss:.4f}{f'; checkpoint {file}' if file else ''}")
        return termination.done(
            message, rank=self._ranks.rank, outcome=outcome, accuracy=accuracy, loss=loss, checkpoint=place,
            resumedFrom=result.resumed_from, progress=run.progress.snapshot(),
        )  # fmt: skip

    def _join(self) -> Group:
        """Set up device and threads, and join the process group."""
        config, ranks = self._config, self._ranks
        self.run.stop.raise_if_requested("start")  # a signal may have come while torch was imported
        device = resolve_device(config, ranks)
        if device.type == "cpu" and (reason := too_few_gpus(config, ranks)):
            self.run.console.log(reason)
        set_numerics(config)
        backend = resolve_backend(config.backend, device)
        keep_freed_memory()
        threads = config.threads or (bitwise.THREADS if config.sync == "bitwise" else 0)
        torch.set_num_threads(threads or threads_per_rank(ranks.nproc_per_node))
        uses_bf16(config, device)  # raises, before any rank is waited for, if it is impossible
        if config.sync == "ddp":
            importlib.import_module("torch._dynamo")  # DDP does it, and once the group exists, it would keep the group
        return self.run.join(
            device, backend, rendezvous_timeout=config.rendezvous_timeout,
            collective_timeout=config.collective_timeout, also_alone=config.backend != "auto",
        )  # fmt: skip

    def _load_data(self) -> Dataset:
        with self.run.stop.interruptible("data"):
            return download.load(self._config, log=self.run.console.log, alive=self.run.heartbeat.touch)

    def _describe(self, group: Group, dataset: Dataset, *, bf16: bool) -> None:
        config, ranks, device = self._config, self._ranks, group.device.type
        where = f"{resolve_backend(config.backend, group.device)} on {device}" if group.has_process_group else device
        self.run.console.log(
            f"ddptrain: {ranks.world_size} rank(s) on {ranks.nnodes} node(s), {where}, "
            f"{torch.get_num_threads()} thread(s) each{', bfloat16' if bf16 else ''}; "
            f"{dataset.name}: {len(dataset.train_labels):,} samples, global batch {config.global_batch}, "
            f"{config.epochs} epoch(s)"
        )
