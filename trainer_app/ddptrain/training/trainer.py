"""The training loop. Collective: every rank runs the same lines in the same order.

``worker`` calls it with group and data in hand; ``begin`` says where to start, ``sync`` and ``evaluate`` exchange.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddptrain.config import Config
from ddptrain.data.batches import TrainingBatches
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import Audit, Indices, Schedule
from ddptrain.distributed.process_group import Group
from ddptrain.errors import NotFinite, Stopped
from ddptrain.reporting.console import Console
from ddptrain.reporting.metrics import Recorder, Telling, result_of
from ddptrain.reporting.progress import Progress
from ddptrain.signals import StopFlag
from ddptrain.training import gradient_sync as graphs
from ddptrain.training import gradient_sync as sync
from ddptrain.training import models, optim
from ddptrain.training.bitwise import Bitwise
from ddptrain.training.evaluate import Evaluation, evaluate
from ddptrain.training.resume import begin


@dataclass(frozen=True)
class Result:
    """How training ended: the last evaluation, and where it came from."""

    evaluation: dict[str, Any]
    resumed_from: dict[str, int] | None
    checkpoint: dict[str, int] | None
    already_finished: bool


class Training:
    """One rank's model, optimizer and batches, at ``done`` completed steps."""

    def __init__(
        self, config: Config, dataset: Dataset, group: Group, *, progress: Progress, console: Console, stop: StopFlag
    ) -> None:
        self._config, self._dataset, self._group = config, dataset, group
        self._console, self._stop = console, stop
        group.crumbs.mark("setup")
        if config.cuda_graph:
            graphs.check(config, group)
        self.schedule = Schedule(len(dataset.train_labels), config.global_batch, config.epochs, config.seed)
        self._recorder = Recorder(config, dataset, self.schedule, group.world_size, progress)
        self._tell = Telling(self._recorder, console, self.schedule)
        self._audit = Audit(Path(config.audit), group.rank) if config.audit else None
        self._model = models.build(config, group.device)
        self._optimizer = optim.build(config, self._model, world_size=group.world_size)
        self.done = 0

    def run(self) -> Result:
        """Train to the end.

        Raises:
            Stopped: a signal came; all ranks left after the same step.
            NotFinite, Superseded, VolumeError, Mismatch: see errors.
        """
        began = begin(
            self._config,
            self._group,
            self._recorder,
            model=self._model,
            optimizer=self._optimizer,
            say=self._console.say,
        )
        if began.place:
            self.done = began.step
            self._tell.resumed(began.place, began.evaluation)
        if began.complete:
            assert began.evaluation is not None, "the last step ends an epoch"
            return Result(began.evaluation, began.place, began.place, already_finished=True)
        self._sync = build_gradient_sync(self._config, self._model, self._group)
        self._batches = self._make_batches()
        evaluation = None
        for step in range(self.done, self.schedule.total_steps):
            stopping = self._advance(step)
            if self.schedule.ends_epoch(self.done):
                evaluation = self._evaluate()
                self._save(evaluation)
            elif stopping or (self._config.checkpoint_every and self.done % self._config.checkpoint_every == 0):
                self._save(None)
            if stopping and self.done < self.schedule.total_steps:
                self._leave()
            if self._config.step_delay:
                self._group.pause(self._config.step_delay)
        assert evaluation is not None, "the last step ends an epoch"
        place = self._last_saved("finished")
        self._sync.close()
        return Result(result_of(evaluation), began.place, place, already_finished=False)

    def _advance(self, step: int) -> bool:
        """One optimizer step on one global batch; True if any rank wants to stop."""
        started = time.perf_counter()
        self._group.crumbs.mark("batch", step + 1)
        batch = self._batches.at(step)
        rate = self._rate_of(step)
        optim.set_learning_rate(self._optimizer, rate)
        self._group.crumbs.mark("step")
        total, stopping = self._sync.step(batch, self._stop.requested or step + 1 == self._config.stop_after)
        loss = total / batch.count
        if not math.isfinite(loss):
            raise self._not_finite(f"loss is {loss} at step {step + 1}", loss, step)
        with self._exchanging("broadcast of updates"):
            self._optimizer.step()
        self._sync.clear()
        self.done = step + 1
        self._tell.step(self.done, loss=loss, rate=rate, samples=batch.count, seconds=time.perf_counter() - started)
        return stopping

    def _rate_of(self, step: int) -> float:
        return optim.learning_rate(self._config.lr, step, self.schedule.total_steps)

    def _evaluate(self) -> Evaluation:
        self._group.crumbs.mark("evaluate")

        def on_use(indices: Indices) -> None:
            if self._audit:
                self._audit.used("eval", self.done, indices)

        result = evaluate(self._model, self._dataset.test_images, self._dataset.test_labels, self._group, on_use)
        if not math.isfinite(result.loss):  # before anything is saved: these weights are worth nothing to a later start
            raise self._not_finite(f"test loss is {result.loss} after step {self.done}", result.loss, self.done - 1)
        self._tell.evaluation(self.done, result)
        return result

    def _not_finite(self, what: str, loss: float, step: int) -> NotFinite:
        """The error, with the samples of the last batch written down for whoever looks for the bad one."""

        def write() -> str | None:
            indices = self._batches.indices(step)
            return self._recorder.not_finite(step + 1, loss=loss, rate=self._rate_of(step), indices=indices)

        path = self._group.from_rank_zero("not finite", write, self._config.collective_timeout, ending=True)
        return NotFinite(
            f"{what}; the batch's indices are in {path}" if path else what,
            hint="the learning rate is too high, or a sample is bad",
            next_step=f"lower --lr (now {self._config.lr:g}), and start in a new --checkpoint-dir",
        )

    def _leave(self) -> None:
        """All ranks are here at the same step; rank 0 has saved it if there is a place to save."""
        self._recorder.flush()
        place = self._last_saved("stopped")
        self._sync.close()
        self._group.close()
        saved = place is not None and place["step"] == self.done
        reason = "the volume refused" if self._config.checkpoint_dir else "no --checkpoint-dir"
        where = "and saved" if saved else f"not saved: {reason}"
        raise Stopped(f"stopped by a signal after step {self.done}, {where}", saved=saved)

    def _last_saved(self, moment: str) -> dict[str, int] | None:
        """Rank 0's newest checkpoint, told to all; the others wait here until it is written."""

        def place() -> dict[str, int] | None:
            return self._recorder.progress.snapshot()["checkpoint"]  # type: ignore[no-any-return]

        return self._group.from_rank_zero(moment, place, self._config.collective_timeout, ending=True)

    def _save(self, evaluation: Evaluation | None) -> None:
        if self._config.checkpoint_dir:
            with self._exchanging("gather of optimizer state"):  # on every rank, not on rank 0 alone
                optim.consolidate(self._optimizer)
        if self._group.rank == 0:
            self._group.crumbs.mark("save")
            self._recorder.save(self.done, self._state, evaluation)

    def _exchanging(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what is a collective with ``--zero``."""
        sharded = self._config.zero and self._group.world_size > 1
        return self._group.crumbs.waiting_in(what) if sharded else contextlib.nullcontext()

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _make_batches(self) -> TrainingBatches:
        def on_use(step: int, indices: Indices) -> None:
            if self._audit:
                self._audit.used("train", step, indices)

        return TrainingBatches(
            self._dataset.train_images,
            self._dataset.train_labels,
            self.schedule,
            shift=self._config.shift,
            device=self._group.device,
            dtype=getattr(torch, self._config.dtype),
            on_use=on_use if self._audit else None,
        )


def build_gradient_sync(config: Config, model: torch.nn.Module, group: Group) -> sync.GradientSync:
    """Return the implementation that ``--sync`` and ``--cuda-graph`` name; one rank needs no exchange."""
    if config.sync == "bitwise":
        return Bitwise(model, group, bf16=config.bf16)
    implementation: type[sync.GradientSync] = sync.GradientSync
    if group.world_size > 1:
        implementation = {"ddp": sync.Ddp, "manual": sync.Manual, "bucketed": sync.Bucketed}[config.sync]
    built = implementation(model, group, accum=config.accum, bf16=config.bf16)
    if config.cuda_graph:
        return sync.Graphed(built, group, full=config.global_batch, bf16=config.bf16)
    return built
