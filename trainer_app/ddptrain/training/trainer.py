"""The training loop. Every rank runs the same lines in the same order; ``worker`` creates the ``Trainer``."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddptrain.config import Config
from ddptrain.data.batches import TrainingBatches
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import Audit, Schedule
from ddptrain.distributed.process_group import Group
from ddptrain.errors import NotFinite, Stopped
from ddptrain.reporting.console import Console
from ddptrain.reporting.metrics import MetricsLogger
from ddptrain.reporting.progress import Progress
from ddptrain.signals import StopFlag
from ddptrain.training import gradient_sync, models, optim, step_graph
from ddptrain.training.bitwise import Bitwise
from ddptrain.training.checkpointer import Checkpointer, SaveResult, resume
from ddptrain.training.evaluate import Evaluation, ResidentSet, evaluate
from ddptrain.training.step import ON_GPU, Step, StepResults
from ddptrain.training.zero import ShardedOptimizer

if TYPE_CHECKING:
    from ddptrain.training.profiling import StepProfiler


@dataclass(frozen=True)
class Result:
    """How a training ended: its last evaluation, and the checkpoints that it resumed from and wrote last."""

    evaluation: dict[str, Any]
    resumed_from: dict[str, int] | None
    checkpoint: dict[str, int] | None
    already_finished: bool


class Trainer:
    """One rank's model, optimizer and batches, and the loop over all steps."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        group: Group,
        *,
        bf16: bool,
        progress: Progress,
        console: Console,
        stop: StopFlag,
    ) -> None:
        self._config, self._dataset, self._group, self._stop, self._log = config, dataset, group, stop, console.log
        self._bf16 = bf16
        group.heartbeat.mark("setup")
        if config.cuda_graph:
            step_graph.check_cuda_graph(config, group)
        self._schedule = Schedule(len(dataset.train_labels), config.global_batch, config.epochs, config.seed)
        self._metrics = MetricsLogger(
            progress, console, epochs=config.epochs, steps_per_epoch=self._schedule.steps_per_epoch
        )
        self._checkpointer = Checkpointer(
            config, dataset, self._schedule, group.world_size,
            bf16=self._bf16, metrics=self._metrics, log=console.log,
        )  # fmt: skip
        self._audit = Audit(Path(config.audit), group.rank) if config.audit else None
        self._model = models.build(config, group.device)
        self._optimizer = optim.build(config, self._model)
        if config.zero and group.world_size > 1:
            self._optimizer = ShardedOptimizer(self._optimizer, group)

    def run(self) -> Result:
        """Train from the newest checkpoint to the last step.

        Raises:
            Stopped: a signal came, or --stop-after was reached; all ranks leave after the same step.
            NotFinite, Superseded, VolumeError, Mismatch: see ``errors``.
        """
        config, group, schedule = self._config, self._group, self._schedule
        start = resume(config, group, self._checkpointer, model=self._model, optimizer=self._optimizer, log=self._log)
        if start.checkpoint:
            self._metrics.resumed(start.checkpoint, (start.evaluation or {}).get("accuracy"))
        if start.complete:
            assert start.evaluation is not None, "the last step ends an epoch"
            return Result(start.evaluation, start.checkpoint, start.checkpoint, already_finished=True)
        self._gradients = build_gradient_sync(config, self._model, group, bf16=self._bf16)
        self._batches = self._build_batches()
        self._test_set = ResidentSet.on(group.device, self._dataset.test_images, self._dataset.test_labels)
        self._results = StepResults(group, config.log_every or (1 if group.device.type == "cpu" else ON_GPU))
        one_step = self._build_step()
        self._profiler = self._profile(start.step) if config.profile else None
        evaluation = saved = None
        wait_for_save = 0.0  # limit of steps in which the other ranks may wait for rank 0's save

        for step in range(start.step, schedule.total_steps):
            done = step + 1
            self._results.begin()
            group.heartbeat.mark("batch", done)
            group.heartbeat.mark("step", limit=wait_for_save)
            stop = self._stop.requested or done == config.stop_after
            numbers = one_step.run(step, self._learning_rate(step), stop=stop, seconds=self._pace())
            self._results.add(done, numbers)
            reading = self._results.due or self._reads_after(done)
            stopping = reading and self._read()

            evaluation = self._evaluate(done) if schedule.ends_epoch(done) else None
            saving = evaluation or stopping or self._saves_after(done)
            if saving:
                saved = self._save(done, evaluation)
            if reading:  # until the next read the other ranks run ahead, and only then wait
                wait_for_save = config.volume_timeout if saving and group.rank != 0 else 0.0
            if stopping and done < schedule.total_steps:
                self._leave(done, saved)
            if config.step_delay:
                group.pause(config.step_delay)

        assert evaluation is not None, "the last step ends an epoch"
        self._close_profiler()
        checkpoint = self._from_rank_zero("finished", saved).checkpoint
        self._gradients.close()
        return Result(evaluation.as_dict(), start.checkpoint, checkpoint, already_finished=False)

    def _reads_after(self, done: int) -> bool:
        """Return whether step ``done`` is one whose loss must be known before what follows; the same on every rank."""
        return self._schedule.ends_epoch(done) or self._saves_after(done) or done == self._config.stop_after

    def _saves_after(self, done: int) -> bool:
        return self._config.checkpoint_every > 0 and done % self._config.checkpoint_every == 0

    def _read(self) -> bool:
        """Log the steps since the last read, and return whether any rank is to stop.

        Raises:
            NotFinite: one of the losses is not; its step has not changed the weights, nor has any after it.
        """
        results, stopping = self._results.read()
        for done, loss_sum in results:
            samples = self._batches.at(done - 1).count
            loss = loss_sum / samples
            if not math.isfinite(loss):
                raise self._not_finite(f"loss is {loss} at step {done}", loss, done - 1)
            self._metrics.step(
                done, loss=loss, learning_rate=self._learning_rate(done - 1), samples=samples,
                seconds=self._results.seconds,
            )  # fmt: skip
        return stopping

    def _pace(self) -> float:
        """Return the seconds from one step to the next, at most; 0 before the first read."""
        seconds = self._results.seconds
        return seconds + self._config.step_delay if seconds else 0.0

    def _learning_rate(self, step: int) -> float:
        return optim.one_cycle(self._config.learning_rate, step, self._schedule.total_steps)

    def _evaluate(self, done: int) -> Evaluation:
        self._group.heartbeat.mark("evaluate")
        on_use = functools.partial(self._audit.used, "eval", done) if self._audit else None
        result = evaluate(self._model, self._test_set, self._group, on_use)
        if not math.isfinite(result.loss):  # raised before the save: a later start could not use these weights
            raise self._not_finite(f"test loss is {result.loss} after step {done}", result.loss, done - 1)
        self._metrics.evaluation(done, accuracy=result.accuracy, loss=result.loss, samples=result.samples)
        return result

    def _save(self, done: int, evaluation: Evaluation | None) -> SaveResult | None:
        """Save on rank 0. Returns what was saved, or None on other ranks."""
        if self._config.checkpoint_dir and isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.gather_state()  # collective, so on every rank
        if self._group.rank != 0:
            return None
        self._group.heartbeat.mark("save", limit=self._config.volume_timeout)
        return self._checkpointer.save(done, self._state, evaluation)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _leave(self, done: int, saved: SaveResult | None) -> None:
        """Leave the group and raise Stopped; every rank calls it after the same step."""
        self._close_profiler()
        by_flag = done == self._config.stop_after and not self._stop.requested
        reason = f"stopped by --stop-after {done}" if by_flag else f"stopped by a signal after step {done}"
        self._metrics.log("stopped", done, message=reason)
        self._metrics.flush(done)
        result = self._from_rank_zero("stopped", saved)
        self._gradients.close()
        self._group.close()
        where = "and saved" if result.checkpoint else f"not saved: {result.reason}"
        raise Stopped(f"{reason}, {where}", saved=result.checkpoint is not None)

    def _from_rank_zero(self, moment: str, saved: SaveResult | None) -> SaveResult:
        """Return the result of rank 0's last save on every rank; the others wait until it is written."""

        def result() -> dict[str, Any]:
            assert saved is not None, "rank 0 saves after the last step"
            return asdict(saved)

        return SaveResult(**self._group.run_on_rank_zero(moment, result, self._config.collective_timeout, ending=True))

    def _not_finite(self, what: str, loss: float, step: int) -> NotFinite:
        """Return the error, after rank 0 has written the last batch's indices and set the weights' checkpoint aside."""

        def write() -> tuple[str | None, bool]:
            path = self._metrics.not_finite(
                step + 1, loss=loss, learning_rate=self._learning_rate(step),
                indices=self._batches.indices(step).tolist(), folder=self._checkpointer.run_folder,
            )  # fmt: skip
            return path, self._checkpointer.set_aside(step)

        path, renamed = self._group.run_on_rank_zero("not finite", write, self._config.collective_timeout, ending=True)
        what += f"; the batch's indices are in {path}" if path else ""
        what += f"; the checkpoint of these weights, step {step}, was renamed to *.not-finite" if renamed else ""
        return NotFinite(
            what,
            hint="the learning rate is too high, or a sample is bad",
            next_step=f"lower --lr (now {self._config.learning_rate:g}), and start in a new --checkpoint-dir",
        )

    def _profile(self, done: int) -> StepProfiler | None:
        """Return the profiler of the steps after ``done``; None if there is no folder for its files."""
        from ddptrain.training.profiling import StepProfiler

        def folder() -> str:
            return str(self._checkpointer.run_folder or self._metrics.folder or "")

        target = self._group.run_on_rank_zero("profile", folder, self._config.collective_timeout)
        if not target:
            return None
        profiler = StepProfiler(
            Path(target) / f"profile-rank-{self._group.rank}.json",
            steps=self._config.profile, accum=self._config.accum,
            first=done + 1, left=self._schedule.total_steps - done,
            device=self._group.device, heartbeat=self._group.heartbeat, log=self._log,
        )  # fmt: skip
        profiler.watch(self._model, self._optimizer)
        return profiler

    def _close_profiler(self) -> None:
        if self._profiler:
            self._profiler.close()

    def _build_batches(self) -> TrainingBatches:
        return TrainingBatches(
            self._dataset.train_images,
            self._dataset.train_labels,
            self._schedule,
            shift=self._config.shift,
            device=self._group.device,
            dtype=getattr(torch, self._config.dtype),
            on_use=functools.partial(self._audit.used, "train") if self._audit else None,
        )

    def _build_step(self) -> Step:
        parts = (self._batches, self._gradients, self._optimizer, self._group)
        if self._config.cuda_graph:
            return step_graph.GraphedStep(*parts, full=self._config.global_batch)
        return Step(*parts)


def build_gradient_sync(
    config: Config, model: torch.nn.Module, group: Group, *, bf16: bool
) -> gradient_sync.GradientSync:
    """Return the implementation that ``--sync`` selects; a single rank exchanges nothing."""
    options: dict[str, Any] = {"bf16": bf16, "label_smoothing": config.label_smoothing}
    if config.sync == "bitwise":
        return Bitwise(model, group, **options)
    implementation: type[gradient_sync.GradientSync] = gradient_sync.GradientSync
    if group.has_process_group:
        implementation = {
            "ddp": gradient_sync.Ddp,
            "manual": gradient_sync.Manual,
            "bucketed": gradient_sync.Bucketed,
        }[config.sync]
    return implementation(model, group, accum=config.accum, **options)
