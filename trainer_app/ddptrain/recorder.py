"""Rank 0's memory: metrics rows, checkpoints and progress, in the one order that survives a kill.

Rows reach the file before the checkpoint that makes them final is renamed. On other ranks, and without a checkpoint
directory, saving does nothing. ``train`` drives it.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddptrain.checkpoint import Saved
from ddptrain.checkpoint_writer import Checkpoints
from ddptrain.config import Config
from ddptrain.errors import VolumeError
from ddptrain.evaluate import Evaluation
from ddptrain.files import write_atomically
from ddptrain.finite import dumps
from ddptrain.metrics import FILE_NAME, MetricsLog
from ddptrain.mnist import Dataset
from ddptrain.numerics import changes, not_the_same_bits, numerics
from ddptrain.order import Schedule
from ddptrain.progress import Progress
from ddptrain.same_run import check_same_run

_FLUSH_INTERVAL = 1.0  # seconds; a reader that follows metrics.jsonl sees rows at this age


class Recorder:
    """Writes what happened. Only rank 0's does anything.

    Attributes:
        facts: what every manifest says of this run.
    """

    def __init__(
        self, config: Config, dataset: Dataset, schedule: Schedule, world_size: int, progress: Progress
    ) -> None:
        self._config, self._schedule, self.progress = config, schedule, progress
        self._checkpoints = (
            Checkpoints(Path(config.checkpoint_dir), keep=config.keep, keep_best=config.keep_best)
            if config.checkpoint_dir
            else None
        )
        self._log: MetricsLog | None = None
        self._flushed, self._failures = 0.0, 0
        self._say: Callable[[str], None] = print
        self.facts: dict[str, Any] = {
            "worldSize": world_size,
            "data": dataset.name,
            "dataDigest": dataset.digest,
            "config": config.identity(),
            "configHash": config.digest(),
            "totalSteps": schedule.total_steps,
            **numerics(),
        }

    def resume(self, say: Callable[[str], None]) -> tuple[Saved, bytes] | None:
        """The checkpoint to continue, proven intact and of this very run.

        Raises:
            Mismatch: it belongs to another configuration or to other data.
            VolumeError: the directory cannot be read.
        """
        if self._checkpoints is None:
            say("no --checkpoint-dir: nothing will be saved, and a restart begins anew")
            return None
        self._say = say
        found = self._checkpoints.resume(say)
        if found:
            check_same_run(found[0].manifest, self.facts, self._checkpoints.root)
            changed = changes(found[0].manifest, self.facts)
            bitwise = self._config.sync == "bitwise"
            if changed and bitwise:
                raise not_the_same_bits(changed)
            if changed or (not bitwise and found[0].manifest.get("worldSize") != self.facts["worldSize"]):
                say("resuming on another world size, threads, CPU or torch: equal up to rounding, not bit for bit")
        return found

    def claim(self, resumed: Saved | None, env: Mapping[str, str] = os.environ) -> int | None:
        """Start a run of our own; its number, or None without a checkpoint directory.

        Raises:
            VolumeError: the directory cannot be written.
        """
        if self._checkpoints is None:
            return None
        self._checkpoints.prepare()  # not before: a finished run needs no more than to be read
        attempt = env.get("DDPJOB_ATTEMPT")
        who = {"uid": env.get("DDPJOB_UID"), "attempt": int(attempt) if attempt and attempt.isdigit() else attempt}
        number = self._checkpoints.claim({**who, "host": socket.gethostname(), "time": time.time()})
        self._log = MetricsLog(self._checkpoints.root / FILE_NAME, number)
        self._log.add(
            "start",
            {
                "resumedFrom": resumed.place if resumed else None,
                "worldSize": self.facts["worldSize"],
                "attempt": who["attempt"],
                "quarantined": self._checkpoints.quarantined,
                "totalSteps": self._schedule.total_steps,
                "data": self.facts["data"],
                "time": time.time(),
            },
        )
        self._log.flush(durable=True)
        self.progress.write_to(self._checkpoints.root / "progress.json")
        return number

    def step(self, step: int, *, loss: float, rate: float, samples_per_second: float) -> None:
        """One completed step."""
        epoch = step // self._schedule.steps_per_epoch
        self.progress.update(
            phase="train", epoch=epoch, step=step, loss=loss, samplesPerSecond=round(samples_per_second, 1)
        )
        self._row("train", step, loss=loss, lr=rate, samplesPerSecond=round(samples_per_second, 1))
        if self._log and time.monotonic() - self._flushed > _FLUSH_INTERVAL:
            self._flushed = time.monotonic()
            with self._going_on(step):
                self._log.flush()

    def evaluation(self, step: int, result: Evaluation) -> None:
        """One completed evaluation."""
        self.progress.update(phase="evaluate", accuracy=result.accuracy)
        self._row("eval", step, accuracy=result.accuracy, loss=result.loss, samples=result.samples)

    def save(
        self, step: int, state: Callable[[], dict[str, Any]], evaluation: Evaluation | None = None
    ) -> Saved | None:
        """Flush the rows, then write a checkpoint of ``state()``; None where there is no place, or it is full.

        A volume that refuses in mid-run costs a checkpoint, not the run: the older ones are still there, and the next
        save may succeed. Only the last save of a run must.

        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: the trained model could not be saved.
        """
        if self._checkpoints is None or self._log is None:
            return None
        complete = step == self._schedule.total_steps
        buffer = io.BytesIO()
        torch.save(state(), buffer)
        facts = {
            **self.facts,
            "cursor": asdict(self._schedule.cursor(step)),
            "evaluation": result_of(evaluation) if evaluation else None,
            "complete": complete,
            "time": time.time(),
        }
        saved = None
        with self._going_on(step):
            self._log.flush(durable=True)  # before the checkpoint that makes its rows final
            saved = None if complete else self._checkpoints.save(step, buffer.getvalue(), facts)
        if complete:
            saved = self._checkpoints.save(step, buffer.getvalue(), facts, last=True)
        if saved:
            self._failures = 0
            self.progress.update(checkpoint=saved.place, checkpointProblem=None)
        return saved

    def not_finite(self, step: int, *, loss: float, rate: float, indices: npt.NDArray[np.int64]) -> str | None:
        """Write down which samples made the loss of step ``step`` what it is. Returns where, or None."""
        self._row("not finite", step, loss=loss, lr=rate)
        self.flush()
        if self._checkpoints is None or self._log is None:
            return None
        path = self._checkpoints.root / f"run-{self._checkpoints.run:06d}" / f"not-finite-{step:09d}.json"
        content = {"step": step, "loss": str(loss), "lr": rate, "indices": indices.tolist()}
        try:
            write_atomically(path, dumps(content).encode(), durable=False)
        except OSError:
            return None
        return str(path)

    def flush(self) -> None:
        """Write what is buffered, as a rank does that is about to leave."""
        if self._log:
            with contextlib.suppress(VolumeError):
                self._log.flush(durable=True)

    @contextlib.contextmanager
    def _going_on(self, step: int) -> Iterator[None]:
        """Inside, a volume that refuses is said, counted and shown in the progress report, and training goes on."""
        try:
            yield
        except VolumeError as error:
            self._failures += 1
            if self._failures == 1:
                self._say(f"warning: {error}; training goes on, unsaved since the last checkpoint")
                self._row("refused", step, message=str(error))
            self.progress.update(checkpointProblem=f"{error} ({self._failures} in a row)")

    def _row(self, event: str, step: int, **values: Any) -> None:
        if self._log:
            epoch = step // self._schedule.steps_per_epoch
            self._log.add(event, {"step": step, "epoch": epoch, **values, "time": round(time.time(), 3)})


def result_of(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as manifests and messages hold it."""
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "correct": evaluation.correct,
        "samples": evaluation.samples,
    }
