"""``metrics.jsonl``: one row per step, evaluation and start, over all runs of the job.

``journal`` appends, on rank 0, beside the checkpoints or, where none are kept, in a directory of its own;
``effective_rows`` reads the history as if no run had ever been interrupted, for ``trials``, ``bench`` and people.

Rank 0's ``metrics.jsonl``, and what else is written down of a run that is no checkpoint.

``recorder`` tells it what happened, and when rows must be on the disk. A volume that refuses costs rows, not the run.

Rank 0's memory: metrics rows, checkpoints and progress, in the one order that survives a kill.

Rows reach the file before the checkpoint that makes them final is renamed. On other ranks, and without a checkpoint
directory, saving does nothing. ``train`` drives it; ``journal`` and ``checkpoint_writer`` write.

What rank 0 says while it trains, to whoever watches: the console's line or bar, the progress report, the metrics.

``train`` calls it after each piece of completed work; the other ranks' words reach nobody.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddptrain.checkpoint import Checkpoints, Saved
from ddptrain.config import Config, check_same_run
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import Schedule
from ddptrain.distributed.device import changes, not_the_same_bits, numerics
from ddptrain.errors import VolumeError, volume_error
from ddptrain.files import dumps, share, write_atomically
from ddptrain.reporting.console import Console
from ddptrain.reporting.progress import Progress
from ddptrain.training.evaluate import Evaluation

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends rows, buffered; ``flush`` before a checkpoint is renamed, so that its rows are never missing."""

    def __init__(self, path: Path, run: int) -> None:
        self._path, self._run = path, run
        self._pending = bytearray()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o664)
            share(path, 0o664)
            size = os.fstat(self._file).st_size
            # A killed run may have left half a line; ours must not continue it.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._pending += b"\n"
        except OSError as error:
            raise volume_error(error, path) from error

    def add(self, event: str, values: Mapping[str, Any]) -> None:
        """Buffer one row; NaN and infinities become null, which JSON has no other word for."""
        row = {"event": event, "run": self._run, **values}
        self._pending += dumps(row).encode() + b"\n"

    def flush(self, *, durable: bool = False) -> None:
        """Write what is buffered. What a full volume does not take stays there for the next time.

        Args:
            durable: also sync to the disk.
        Raises:
            VolumeError: the volume refused.
        """
        try:
            while self._pending:
                del self._pending[: os.write(self._file, self._pending)]
            if durable:
                os.fsync(self._file)
        except OSError as error:
            raise volume_error(error, self._path) from error


def effective_rows(path: Path | str, event: str | None = None) -> list[dict[str, Any]]:
    """The train and eval rows that count, in order of step: those that the newest run descends from.

    The newest run counts whole; of the run it resumed from, the rows up to the step it resumed at; and so on back to a
    run that began at zero. What a killed run did beyond its last checkpoint, and what a leftover of an old attempt
    still appends, is dropped, wherever in the file it stands. Torn lines are skipped.

    Args:
        event: only rows of this kind, ``train`` or ``eval``.
    """
    origins: dict[int, dict[str, int] | None] = {}
    rows: list[dict[str, Any]] = []
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["event"] == "start":
                origins[int(row["run"])] = row["resumedFrom"]
            elif row["event"] in ("train", "eval"):
                rows.append({**row, "run": int(row["run"]), "step": int(row["step"])})
        except (ValueError, KeyError, TypeError):
            continue
    last_steps = _ancestry(origins)
    kept = [
        row
        for row in rows
        if row["step"] <= last_steps.get(row["run"], -1) and (event is None or row["event"] == event)
    ]
    return sorted(kept, key=lambda row: (row["step"], row["event"] == "eval"))


def _ancestry(origins: Mapping[int, Mapping[str, int] | None]) -> dict[int, float]:
    """Run to the last of its steps that counts, for the newest run and all it descends from."""
    last_steps: dict[int, float] = {}
    run, step = max(origins, default=0), math.inf
    while run in origins and run not in last_steps:
        last_steps[run] = step
        origin = origins[run]
        if origin is None:
            break
        run, step = origin["run"], min(step, origin["step"])
    return last_steps


_FLUSH_INTERVAL = 1.0  # seconds; a reader that follows metrics.jsonl sees rows at this age


def temporary_folder() -> Path:
    """A new directory for the journal of a run that keeps nothing else.

    Raises:
        VolumeError: there is no directory for temporary files, or it cannot be written.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="ddptrain-"))
    except OSError as error:
        raise volume_error(error, "a temporary directory") from error


class Journal:
    """The rows of one run.

    Args:
        folder: where metrics.jsonl and progress.json are; it exists.
        beside_checkpoints: a volume that refuses rows will refuse checkpoints, and the progress report says so.
        run: number that every row bears.
        steps_per_epoch: for the epoch that every row bears.
    Raises:
        VolumeError: metrics.jsonl cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        run: int,
        *,
        steps_per_epoch: int,
        progress: Progress,
        say: Callable[[str], None],
        beside_checkpoints: bool,
    ) -> None:
        self.path = folder / FILE_NAME
        self._folder, self._steps_per_epoch, self._progress, self._say = folder, steps_per_epoch, progress, say
        self._log = MetricsLog(self.path, run)
        self._flushed, self._failures, self._beside_checkpoints = 0.0, 0, beside_checkpoints

    def begin(self, values: Mapping[str, Any]) -> None:
        """The start's row, on the disk; from now on the progress report is kept beside it.

        Raises:
            VolumeError: it cannot be written.
        """
        self._log.add("start", {**values, "time": time.time()})
        self._log.flush(durable=True)
        self._progress.write_to(self._folder / "progress.json")

    def row(self, event: str, step: int, **values: Any) -> None:
        """Note one row; it is written with the next ``flush``, or about a second later."""
        self._add(event, step, values)
        if time.monotonic() - self._flushed > _FLUSH_INTERVAL:
            self._flushed = time.monotonic()
            with self.going_on(step):
                self._log.flush()

    def _add(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        epoch = step // self._steps_per_epoch
        self._log.add(event, {"step": step, "epoch": epoch, **values, "time": round(time.time(), 3)})

    def flush(self) -> None:
        """Write what is buffered, to the disk.

        Raises:
            VolumeError: the volume refused; the rows stay for the next time.
        """
        self._log.flush(durable=True)

    def last_words(self) -> None:
        """As ``flush``, of a rank that is about to leave: it leaves, whatever the volume says."""
        with contextlib.suppress(VolumeError):
            self.flush()

    @contextlib.contextmanager
    def going_on(self, step: int) -> Iterator[None]:
        """Inside, a volume that refuses is said, counted and shown in the progress report, and training goes on."""
        try:
            yield
        except VolumeError as error:
            self._failures += 1
            if self._failures == 1:
                without = "unsaved" if self._beside_checkpoints else "without these metrics"
                self._say(f"warning: {error}; training goes on, {without}")
                self._add("refused", step, {"message": str(error)})
            if self._beside_checkpoints:
                self._progress.update(checkpointProblem=f"{error} ({self._failures} in a row)")

    def saved(self, place: Mapping[str, int]) -> None:
        """A checkpoint is there: the volume does not refuse, or no longer."""
        self._failures = 0
        self._progress.update(checkpoint=place, checkpointProblem=None)

    def not_finite(self, folder: Path | None, step: int, *, loss: float, rate: float, indices: Sequence[int]) -> str:
        """Write down which samples made the loss of step ``step`` what it is. Returns where.

        Args:
            folder: of the file; None for beside the metrics.
        Raises:
            OSError: it cannot be written.
        """
        self.row("not finite", step, loss=loss, lr=rate)
        self.last_words()
        path = (folder or self._folder) / f"not-finite-{step:09d}.json"
        content = {"step": step, "loss": str(loss), "lr": rate, "indices": list(indices)}
        write_atomically(path, dumps(content).encode(), durable=False)
        return str(path)


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


_KEPT = 0.9  # share of the past in the smoothed speed


class Telling:
    """One run's story."""

    def __init__(self, recorder: Recorder, console: Console, schedule: Schedule) -> None:
        self._recorder, self._console, self._schedule = recorder, console, schedule
        self._speed = 0.0  # samples per second, smoothed
        recorder.progress.update(phase="setup", totalEpochs=schedule.epochs, totalSteps=schedule.total_steps)

    def resumed(self, place: dict[str, int], evaluation: dict[str, Any] | None) -> None:
        """Training goes on at the checkpoint ``place``, with which ``evaluation`` was recorded."""
        self._recorder.progress.update(
            step=place["step"], epoch=place["step"] // self._schedule.steps_per_epoch, checkpoint=place,
            accuracy=(evaluation or {}).get("accuracy"), resumedFrom=place,
        )  # fmt: skip

    def step(self, done: int, *, loss: float, rate: float, samples: int, seconds: float) -> None:
        """Step number ``done`` is completed; its ``samples`` took ``seconds``."""
        speed = samples / seconds
        self._speed = speed if self._speed == 0 else _KEPT * self._speed + (1 - _KEPT) * speed
        self._recorder.step(done, loss=loss, rate=rate, samples_per_second=self._speed)
        epoch = self._schedule.cursor(done - 1).epoch + 1
        text = f"epoch {epoch}/{self._schedule.epochs} · loss {loss:.4f} · {self._speed:,.0f} samples/s"
        self._console.step(done, self._schedule.total_steps, text)

    def evaluation(self, done: int, result: Evaluation) -> None:
        """The model of ``done`` completed steps was judged."""
        self._recorder.evaluation(done, result)
        epoch = done // self._schedule.steps_per_epoch
        self._console.say(
            f"epoch {epoch}/{self._schedule.epochs}: test accuracy {result.accuracy:.4f}, loss {result.loss:.4f}"
        )
