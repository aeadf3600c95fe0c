"""The training loop, and how a run begins, resumes and ends. Collective: every rank runs the same lines in order.

Called by ``worker`` with the group and the data in hand; ``recorder`` writes, ``sync`` and ``evaluate`` exchange.
"""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ddptrain import models, optim, sync
from ddptrain.batches import TrainingBatches
from ddptrain.config import Config
from ddptrain.console import Console
from ddptrain.errors import NotFinite, Stopped
from ddptrain.evaluate import Evaluation, evaluate
from ddptrain.group import Group
from ddptrain.mnist import Dataset
from ddptrain.order import Schedule
from ddptrain.progress import Progress
from ddptrain.recorder import Recorder, result_of
from ddptrain.stop import StopFlag


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
        self.schedule = Schedule(len(dataset.train_labels), config.global_batch, config.epochs, config.seed)
        self._recorder = Recorder(config, dataset, self.schedule, group.world_size, progress)
        self._model = models.build(config, group.device)
        self._optimizer = optim.build(config, self._model)
        self._numbers = sync.StepNumbers(group)
        self._rate = 0.0  # samples per second, smoothed
        self.done = 0
        progress.update(phase="setup", totalEpochs=config.epochs, totalSteps=self.schedule.total_steps)

    def run(self) -> Result:
        """Train to the end.

        Raises:
            Stopped: a signal came; all ranks left after the same step.
            NotFinite, Superseded, VolumeError, Mismatch: see errors.
        """
        resumed = self._resume()
        if resumed["complete"]:
            return Result(resumed["evaluation"], resumed["place"], resumed["place"], already_finished=True)
        self._step_model = sync.wrap(self._model, self._group)
        self._batches = self._make_batches()
        evaluation = None
        for step in range(self.done, self.schedule.total_steps):
            stopping = self._advance(step)
            if self.schedule.ends_epoch(self.done):
                evaluation = self._evaluate()
                self._recorder_save(evaluation)
            elif stopping or (self._config.checkpoint_every and self.done % self._config.checkpoint_every == 0):
                self._recorder_save(None)
            if stopping and self.done < self.schedule.total_steps:
                self._leave()
            if self._config.step_delay:
                time.sleep(self._config.step_delay)
        assert evaluation is not None, "the last step ends an epoch"
        return Result(result_of(evaluation), resumed["place"], self._last_saved("finished"), already_finished=False)

    def _advance(self, step: int) -> bool:
        """One optimizer step on one global batch; True if any rank wants to stop."""
        started = time.perf_counter()
        batch = self._batches.at(step)
        rate = optim.learning_rate(self._config.lr, step, self.schedule.total_steps)
        optim.set_learning_rate(self._optimizer, rate)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._config.bf16):
            logits = self._step_model(batch.images)
            loss_sum = functional.cross_entropy(logits, batch.labels, reduction="sum")
        self._numbers.send(loss_sum, self._stop.requested)
        (loss_sum * (self._group.world_size / batch.global_count)).backward()  # type: ignore[no-untyped-call]
        total, stopping = self._numbers.receive()
        loss = total / batch.global_count
        if not math.isfinite(loss):
            raise self._not_finite(f"loss is {loss} at step {step + 1}")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done = step + 1
        self._tell(loss, rate, batch.global_count / (time.perf_counter() - started))
        return stopping

    def _tell(self, loss: float, rate: float, samples_per_second: float) -> None:
        self._rate = samples_per_second if self._rate == 0 else 0.9 * self._rate + 0.1 * samples_per_second
        self._recorder.step(self.done, loss=loss, rate=rate, samples_per_second=self._rate)
        epoch = self.schedule.cursor(self.done - 1).epoch + 1
        text = f"epoch {epoch}/{self._config.epochs} · loss {loss:.4f} · {self._rate:,.0f} samples/s"
        self._console.step(self.done, self.schedule.total_steps, text)

    def _evaluate(self) -> Evaluation:
        result = evaluate(self._model, self._dataset.test_images, self._dataset.test_labels, self._group)
        if not math.isfinite(result.loss):  # before anything is saved: these weights are worth nothing to a later start
            raise self._not_finite(f"test loss is {result.loss} after step {self.done}")
        self._recorder.evaluation(self.done, result)
        epoch = self.done // self.schedule.steps_per_epoch
        self._console.say(
            f"epoch {epoch}/{self._config.epochs}: test accuracy {result.accuracy:.4f}, loss {result.loss:.4f}"
        )
        return result

    def _not_finite(self, what: str) -> NotFinite:
        return NotFinite(
            what,
            hint="the learning rate is too high, or a sample is bad",
            next_step=f"lower --lr (now {self._config.lr:g}), and start in a new --checkpoint-dir",
        )

    def _leave(self) -> None:
        """All ranks are here at the same step; rank 0 has saved it if there is a place to save."""
        self._recorder.flush()
        place = self._last_saved("stopped")
        self._group.close()
        saved = place is not None and place["step"] == self.done
        where = "and saved" if saved else "not saved: no --checkpoint-dir"
        raise Stopped(f"stopped by a signal after step {self.done}, {where}", saved=saved)

    def _resume(self) -> dict[str, Any]:
        """Bring every rank to the newest checkpoint, which only rank 0 needs to see, and claim a run."""
        content = b""

        def on_rank_zero() -> dict[str, Any]:
            nonlocal content
            found = self._recorder.resume(self._console.say)
            saved, content = found if found else (None, b"")
            manifest = saved.manifest if saved else {}
            complete = bool(manifest.get("complete"))
            run = None if complete else self._recorder.claim(saved)
            return {
                "place": saved.place if saved else None,
                "size": len(content),
                "complete": complete,
                "evaluation": manifest.get("evaluation"),
                "run": run,
            }

        told = self._group.from_rank_zero("resume", on_rank_zero, self._config.collective_timeout)
        place = told["place"]
        if place:
            self.done = place["step"]
            self._recorder.progress.update(
                step=self.done, epoch=self.done // self.schedule.steps_per_epoch, checkpoint=place,
                accuracy=(told["evaluation"] or {}).get("accuracy"), resumedFrom=place,
            )  # fmt: skip
        if place and not told["complete"]:
            content = self._group.broadcast_bytes(content, told["size"])
            state = torch.load(io.BytesIO(content), map_location=self._group.device, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._console.say(f"resumed from run {place['run']}, step {place['step']}")
        return told

    def _last_saved(self, moment: str) -> dict[str, int] | None:
        """Rank 0's newest checkpoint, told to all; the others wait here until it is written."""

        def place() -> dict[str, int] | None:
            return self._recorder.progress.snapshot()["checkpoint"]  # type: ignore[no-any-return]

        return self._group.from_rank_zero(moment, place, self._config.collective_timeout, ending=True)

    def _recorder_save(self, evaluation: Evaluation | None) -> None:
        if self._group.rank == 0:
            self._recorder.save(self.done, self._state, evaluation)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _make_batches(self) -> TrainingBatches:
        return TrainingBatches(
            self._dataset.train_images,
            self._dataset.train_labels,
            self.schedule,
            shift=self._config.shift,
            rank=self._group.rank,
            world_size=self._group.world_size,
            device=self._group.device,
            dtype=getattr(torch, self._config.dtype),
        )
