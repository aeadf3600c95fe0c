"""Rank 0's memory: metrics rows, checkpoints and progress, in the one order that survives a kill.

Rows reach the file before the checkpoint that makes them final is renamed. On other ranks, and without a checkpoint
directory, saving does nothing. ``train`` drives it; ``journal`` and ``checkpoint_writer`` write.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
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
from ddptrain.journal import Journal, temporary_folder
from ddptrain.mnist import Dataset
from ddptrain.numerics import changes, not_the_same_bits, numerics
from ddptrain.order import Schedule
from ddptrain.progress import Progress
from ddptrain.same_run import check_same_run


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
        self._journal: Journal | None = None
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
        self._say = say
        if self._checkpoints is None:
            say("no --checkpoint-dir: nothing will be saved, and a restart begins anew")
            return None
        found = self._checkpoints.resume(say)
        if found:
            check_same_run(found[0].manifest, self.facts, self._checkpoints.root)
        if found and not found[0].manifest.get("complete"):  # else nothing is left to compute
            changed = changes(found[0].manifest, self.facts)
            bitwise = self._config.sync == "bitwise"
            if changed and bitwise:
                raise not_the_same_bits(changed)
            if changed or (not bitwise and found[0].manifest.get("worldSize") != self.facts["worldSize"]):
                say("resuming on another world size, threads, CPU or torch: equal up to rounding, not bit for bit")
        return found

    def claim(self, resumed: Saved | None, env: Mapping[str, str] = os.environ) -> None:
        """Start a run of our own, and its journal; without a checkpoint directory the journal alone.

        Raises:
            VolumeError: the directory cannot be written.
        """
        if self._checkpoints is None:
            self._keep_a_journal_somewhere()
            return
        self._checkpoints.prepare()  # not before: a finished run needs no more than to be read
        attempt = env.get("DDPJOB_ATTEMPT")
        who = {"uid": env.get("DDPJOB_UID"), "attempt": int(attempt) if attempt and attempt.isdecimal() else attempt}
        number = self._checkpoints.claim({**who, "host": socket.gethostname(), "time": time.time()})
        self._journal = self._opened(self._checkpoints.root, number, resumed, who["attempt"])

    def _keep_a_journal_somewhere(self) -> None:
        """Metrics are always there to be looked at, but no reason to fail where nothing was asked for."""
        try:
            self._journal = self._opened(temporary_folder(), 1, None, None)
            self._say(f"metrics: {self._journal.path}")
        except VolumeError as error:
            self._say(f"warning: no metrics: {error}")

    def _opened(self, folder: Path, run: int, resumed: Saved | None, attempt: int | str | None) -> Journal:
        journal = Journal(
            folder, run, steps_per_epoch=self._schedule.steps_per_epoch, progress=self.progress, say=self._say,
            beside_checkpoints=self._checkpoints is not None,
        )  # fmt: skip
        journal.begin(
            {
                "resumedFrom": resumed.place if resumed else None,
                "worldSize": self.facts["worldSize"],
                "attempt": attempt,
                "quarantined": self._checkpoints.quarantined if self._checkpoints else 0,
                "totalSteps": self._schedule.total_steps,
                "data": self.facts["data"],
            }
        )
        return journal

    def step(self, step: int, *, loss: float, rate: float, samples_per_second: float) -> None:
        """One completed step."""
        epoch = step // self._schedule.steps_per_epoch
        speed = round(samples_per_second, 1)
        self.progress.update(phase="train", epoch=epoch, step=step, loss=loss, samplesPerSecond=speed)
        if self._journal:
            self._journal.row("train", step, loss=loss, lr=rate, samplesPerSecond=speed)

    def evaluation(self, step: int, result: Evaluation) -> None:
        """One completed evaluation."""
        self.progress.update(phase="evaluate", accuracy=result.accuracy)
        if self._journal:
            self._journal.row("eval", step, accuracy=result.accuracy, loss=result.loss, samples=result.samples)

    def save(self, step: int, state: Callable[[], dict[str, Any]], evaluation: Evaluation | None = None) -> None:
        """Flush the rows, then write a checkpoint of ``state()``, where there is a place for one.

        A volume that refuses in mid-run costs a checkpoint, not the run: the older ones are still there, and the next
        save may succeed. Only the last save of a run must.

        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: the trained model could not be saved.
        """
        if self._checkpoints is None or self._journal is None:
            self.flush()
            return
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
        with self._journal.going_on(step):
            self._journal.flush()  # before the checkpoint that makes its rows final
            saved = None if complete else self._checkpoints.save(step, buffer.getvalue(), facts)
        if complete:
            saved = self._checkpoints.save(step, buffer.getvalue(), facts, last=True)
        if saved:
            self._journal.saved(saved.place)

    def not_finite(self, step: int, *, loss: float, rate: float, indices: npt.NDArray[np.int64]) -> str | None:
        """Write down which samples made the loss of step ``step`` what it is. Returns where, or None."""
        if self._journal is None:
            return None
        run = self._checkpoints.root / f"run-{self._checkpoints.run:06d}" if self._checkpoints else None
        try:
            return self._journal.not_finite(run, step, loss=loss, rate=rate, indices=indices.tolist())
        except OSError:
            return None

    def flush(self) -> None:
        """Write what is buffered, as a rank does that is about to leave."""
        if self._journal:
            self._journal.last_words()


def result_of(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as manifests and messages hold it."""
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "correct": evaluation.correct,
        "samples": evaluation.samples,
    }
