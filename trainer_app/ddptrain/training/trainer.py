"""The training loop. Every rank runs the same lines in the same order; ``worker`` runs it."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ddprun.distributed.process_group import Group
from ddprun.errors import Stopped
from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddprun.signals import StopFlag
from ddptrain.config import Config
from ddptrain.data.batches import TrainingBatches
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import Schedule
from ddptrain.errors import NotFinite
from ddptrain.training import gradient_sync, models, optim
from ddptrain.training.bitwise import Bitwise
from ddptrain.training.checkpointer import Checkpointer, SaveResult
from ddptrain.training.evaluate import evaluate, logits_of, test_set
from ddptrain.training.metrics import MetricsLogger
from ddptrain.training.step import ON_GPU, Step, StepResults


@dataclass(frozen=True)
class Result:
    """How a training ended: its last evaluation, and the checkpoints that it resumed from and wrote last."""

    evaluation: dict[str, Any]
    resumed_from: dict[str, Any] | None
    checkpoint: dict[str, Any] | None
    already_finished: bool


class Training:
    """One rank's parts of a training, and the loop over its steps.

    Args:
        bf16: whether the passes run in bfloat16; the same on every rank.
    """

    def __init__(
        self, config: Config, dataset: Dataset, group: Group, stop: StopFlag, *,
        bf16: bool, progress: ProgressRecord, console: Console,
    ) -> None:  # fmt: skip
        group.heartbeat.mark("setup")
        self.config, self.group, self.stop, self.bf16 = config, group, stop, bf16
        self.schedule = Schedule(len(dataset.train_labels), config.global_batch, config.epochs, config.seed)
        self.metrics = MetricsLogger(
            progress, console, epochs=config.epochs, steps_per_epoch=self.schedule.steps_per_epoch
        )
        self.checkpointer = Checkpointer(
            config, dataset, self.schedule, group, bf16=bf16, metrics=self.metrics, log=console.log
        )
        self.model = models.build(config, group.device)
        self.optimizer = optim.build(config, self.model)
        self.batches = TrainingBatches(
            dataset.train_images, dataset.train_labels, self.schedule,
            shift=config.shift, device=group.device, dtype=getattr(torch, config.dtype),
        )  # fmt: skip
        self.test_set = test_set(dataset, group.device)
        self.results = StepResults(group, config.log_every or (1 if group.device.type == "cpu" else ON_GPU))

    def run(self) -> Result:
        """Train from the newest checkpoint to the last step; collective.

        Raises:
            Stopped: a signal came, or --stop-after was reached; all ranks leave after the same step.
            NotFinite, Superseded, VolumeError, Mismatch: see ``errors``.
        """
        start = self.checkpointer.resume(self.model, self.optimizer)
        if start.checkpoint:
            self.metrics.resumed(start.checkpoint, (start.evaluation or {}).get("accuracy"))
        if start.complete:
            assert start.evaluation is not None, "the last step ends an epoch"
            return Result(start.evaluation, start.checkpoint, start.checkpoint, already_finished=True)
        self.gradients = build_gradient_sync(self.config, self.model, self.group, bf16=self.bf16)
        self.one_step = Step(self.batches, self.gradients, self.optimizer, self.group)
        evaluation, saved = self._steps(start.step)
        return Result(evaluation, start.checkpoint, saved.checkpoint, already_finished=False)

    def _steps(self, first: int) -> tuple[dict[str, Any], SaveResult]:
        """Run the steps after ``first`` completed ones. Returns the last evaluation and the last save; collective."""
        config, group, schedule = self.config, self.group, self.schedule
        evaluation = saved = None
        wait_for_save = 0.0  # limit of steps in which the other ranks may wait for rank 0's save
        for step in range(first, schedule.total_steps):
            done = step + 1
            self.results.begin()
            group.heartbeat.mark("batch", done)
            group.heartbeat.mark("step", limit=wait_for_save)
            stop = self.stop.requested or done == config.stop_after
            pace = self.results.seconds + config.step_delay if self.results.seconds else 0.0
            numbers = self.one_step.run(step, self._learning_rate(step), stop=stop, seconds=pace)
            self.results.add(done, numbers)
            ends_epoch = schedule.ends_epoch(done)
            saves = ends_epoch or (config.checkpoint_every > 0 and done % config.checkpoint_every == 0)
            # The loss must be known before what follows; the same steps are read on every rank.
            reading = saves or self.results.due or done == config.stop_after
            stopping = reading and self._read()

            evaluation = self._evaluate(done) if ends_epoch else None
            saving = saves or stopping
            if saving:
                saved = self._save(done, evaluation)
            if reading:  # until the next read the other ranks run ahead, and only then wait
                wait_for_save = config.volume_timeout if saving and group.rank != 0 else 0.0
            if stopping and done < schedule.total_steps:
                self._leave(done, saved)
            if config.step_delay:
                group.pause(config.step_delay)

        assert evaluation is not None, "the last step ends an epoch"
        last = self._from_rank_zero("finished", saved)
        self.gradients.close()
        return evaluation, last

    def _read(self) -> bool:
        """Log the steps since the last read, and return whether any rank is to stop.

        Raises:
            NotFinite: a loss is not finite; neither its step nor any step after it has changed the weights.
        """
        losses, stopping = self.results.read()
        for done, loss_sum in losses:
            samples = self.batches.at(done - 1).count
            loss = loss_sum / samples
            if not math.isfinite(loss):
                raise self._not_finite(f"loss is {loss} at step {done}", loss, done - 1)
            self.metrics.step(
                done, loss=loss, learning_rate=self._learning_rate(done - 1), samples=samples,
                seconds=self.results.seconds,
            )  # fmt: skip
        return stopping

    def _learning_rate(self, step: int) -> float:
        return optim.one_cycle(self.config.learning_rate, step, self.schedule.total_steps)

    def _evaluate(self, done: int) -> dict[str, Any]:
        self.group.heartbeat.mark("evaluate")
        images, labels = self.test_set
        result = evaluate(logits_of(self.model, images, self.group), labels)
        loss = result["loss"]
        if not math.isfinite(loss):  # raised before the save: a later start could not use these weights
            raise self._not_finite(f"test loss is {loss} after step {done}", loss, done - 1)
        self.metrics.evaluation(done, accuracy=result["accuracy"], loss=loss, samples=result["samples"])
        return result

    def _save(self, done: int, evaluation: dict[str, Any] | None) -> SaveResult | None:
        """Save on rank 0. Returns what was saved, or None on other ranks."""
        if self.group.rank != 0:
            return None

        def content() -> dict[str, Any]:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        return self.checkpointer.save(done, content, evaluation)

    def _leave(self, done: int, saved: SaveResult | None) -> None:
        """Leave the group and raise Stopped; every rank calls it after the same step."""
        by_flag = done == self.config.stop_after and not self.stop.requested
        reason = f"stopped by --stop-after {done}" if by_flag else f"stopped by a signal after step {done}"
        self.metrics.log("stopped", done, message=reason)
        self.metrics.flush()
        result = self._from_rank_zero("stopped", saved)
        self.gradients.close()
        self.group.close()
        where = "and saved" if result.checkpoint else f"not saved: {result.reason}"
        raise Stopped(f"{reason}, {where}", saved=result.checkpoint is not None)

    def _from_rank_zero(self, moment: str, saved: SaveResult | None) -> SaveResult:
        """Return the result of rank 0's last save on every rank; the others wait until it is written."""

        def result() -> dict[str, Any]:
            assert saved is not None, "rank 0 saves after the last step"
            return asdict(saved)

        return SaveResult(**self.group.run_on_rank_zero(moment, result, self.config.collective_timeout, ending=True))

    def _not_finite(self, what: str, loss: float, step: int) -> NotFinite:
        """Return the error, after rank 0 has logged the loss and set the checkpoint of the weights aside."""

        def write() -> bool:
            self.group.heartbeat.mark("save", limit=self.config.volume_timeout)
            self.metrics.log("not finite", step + 1, loss=loss, lr=self._learning_rate(step))
            self.metrics.flush()
            return self.checkpointer.set_aside(step)

        if self.group.run_on_rank_zero("not finite", write, self.config.collective_timeout, ending=True):
            what += f"; the checkpoint of these weights, step {step}, was renamed to *.not-finite"
        return NotFinite(
            what,
            hint="the learning rate is too high, or a sample is bad",
            next_step=f"lower --lr (now {self.config.learning_rate:g}), and start in a new --checkpoint-dir",
        )


def build_gradient_sync(config: Config, model: nn.Module, group: Group, *, bf16: bool) -> gradient_sync.GradientSync:
    """Return the implementation that ``--sync`` selects; a single rank exchanges nothing."""
    implementation: type[gradient_sync.GradientSync] = gradient_sync.GradientSync
    if config.sync == "bitwise":
        implementation = Bitwise
    elif group.has_process_group:
        implementation = {
            "ddp": gradient_sync.Ddp,
            "manual": gradient_sync.Manual,
            "bucketed": gradient_sync.Bucketed,
        }[config.sync]
    return implementation(model, group, accum=config.accum, bf16=bf16, label_smoothing=config.label_smoothing)
