"""The metrics of a training: ``metrics/run-N.jsonl``, the progress report and the console's lines.

The trainer writes them through ``MetricsLogger``. ``effective_rows`` reads the files of all runs as if the training had
never been interrupted; the experiments and people who plot a curve use it. Each run has its own file, because NFS does
not append atomically: rows of an older attempt that still runs would overwrite rows of the newer attempt.
"""

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddprun.errors import VolumeError, volume_errors
from ddprun.files import BackgroundWrite, Json, dumps_json, share, sync, write_atomically
from ddprun.reporting.console import Console
from ddprun.reporting.progress import Progress

FOLDER = "metrics"
_OLDER_FILE = "metrics.jsonl"  # of all runs; written by versions up to 0.1
_FLUSH_INTERVAL = 1.0  # seconds between writes of buffered rows, for readers that follow the file
_SPEED_SMOOTHING = 0.9  # weight of the past in the moving average of the speed
_LARGEST = 10**12  # number of a run or of a step


class MetricsLogger:
    """Logs one rank's completed work: to the progress report, the console, and the run's metrics once these are open.

    Only rank 0 opens them. The rows are buffered and written about once a second, by a thread, and before each
    checkpoint: that save is a phase with the volume's limit, while a step must not wait for the volume.
    A volume that refuses them does not stop the training: the rows stay buffered, the first refusal is printed, and
    next to checkpoints the progress report shows it as ``checkpointProblem``.
    """

    def __init__(self, progress: Progress, console: Console, *, epochs: int, steps_per_epoch: int) -> None:
        self._progress, self._console = progress, console
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._path: Path | None = None
        self._folder = Path()
        self._file, self._run, self._with_checkpoints = -1, 0, False
        self._buffer, self._rows, self._writing = bytearray(), threading.Lock(), threading.Lock()
        self._flushed, self._refusals = time.monotonic(), 0
        self._background = BackgroundWrite(self._flush_in_background)
        self._step = 0  # of the newest row, when a write was requested
        self._speed = 0.0  # samples per second, smoothed
        progress.update(phase="setup", totalEpochs=epochs, totalSteps=epochs * steps_per_epoch)

    def open(self, folder: Path, run: int, *, with_checkpoints: bool, **start: Any) -> None:
        """Open ``folder/metrics/run-N.jsonl``, write the ``start`` row to disk, and keep progress.json in ``folder``.

        Args:
            run: the number N, which is also in every row.
            with_checkpoints: checkpoints go to the same volume, so one that refuses rows will refuse them too.
            start: further fields of the ``start`` row.
        Raises:
            VolumeError: the file cannot be opened or written.
        """
        path = folder / FOLDER / f"run-{run:06d}.jsonl"
        with volume_errors(path):
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                share(path.parent, 0o2775)
            # The run is new: an older file of its name is of a run whose folder somebody deleted.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o664)
            share(path, 0o664)
        self._path, self._folder, self._run, self._with_checkpoints = path, folder, run, with_checkpoints
        self._append("start", start)
        self._write(durable=True)
        self._progress.write_to(folder / "progress.json")

    def open_temporary(self, **start: Any) -> None:
        """Open the metrics in a new temporary directory and print their path. A failure is only a warning."""
        try:
            self.open(Path(tempfile.mkdtemp(prefix="ddptrain-")), 1, with_checkpoints=False, **start)
            self._console.log(f"metrics: {self._path}")
        except (OSError, VolumeError) as error:
            self._path = None
            self._console.log(f"warning: no metrics: {error}")

    @property
    def folder(self) -> Path | None:
        """The folder given to ``open``; None if the metrics are not open."""
        return self._folder if self._path else None

    def resumed(self, checkpoint: Mapping[str, int], accuracy: float | None) -> None:
        """Report that training continues from ``checkpoint``, with its test accuracy if one was measured."""
        step = checkpoint["step"]
        self._progress.update(
            step=step, epoch=step // self._steps_per_epoch, checkpoint=checkpoint, accuracy=accuracy,
            resumedFrom=checkpoint,
        )  # fmt: skip

    def step(self, step: int, *, loss: float, learning_rate: float, samples: int, seconds: float) -> None:
        """Log training step number ``step``, which took ``seconds`` for ``samples`` over all ranks."""
        speed = samples / seconds
        self._speed = _SPEED_SMOOTHING * self._speed + (1 - _SPEED_SMOOTHING) * speed if self._speed else speed
        rounded = round(self._speed, 1)
        self._progress.update(
            phase="train", epoch=step // self._steps_per_epoch, step=step, loss=loss, samplesPerSecond=rounded
        )
        self.log("train", step, loss=loss, lr=learning_rate, samplesPerSecond=rounded)
        epoch = (step - 1) // self._steps_per_epoch + 1
        text = f"epoch {epoch}/{self._epochs} · loss {loss:.4f} · {self._speed:,.0f} samples/s"
        self._console.step(step, self._epochs * self._steps_per_epoch, text)

    def evaluation(self, step: int, *, accuracy: float, loss: float, samples: int) -> None:
        """Log the evaluation after step ``step``."""
        self._progress.update(phase="evaluate", accuracy=accuracy)
        self.log("eval", step, accuracy=accuracy, loss=loss, samples=samples)
        epoch = step // self._steps_per_epoch
        self._console.log(f"epoch {epoch}/{self._epochs}: test accuracy {accuracy:.4f}, loss {loss:.4f}")

    def not_finite(
        self, step: int, *, loss: float, learning_rate: float, indices: Sequence[int], folder: Path | None
    ) -> str | None:
        """Log a loss that is not finite and write the batch's sample indices to a file.

        Args:
            folder: where the file goes; None for the folder of progress.json.
        Returns:
            The file's path, or None if it could not be written.
        """
        if self._path is None:
            return None
        self.log("not finite", step, loss=loss, lr=learning_rate)
        path = (folder or self._folder) / f"not-finite-{step:09d}.json"
        content = {"step": step, "loss": str(loss), "lr": learning_rate, "indices": list(indices)}
        with contextlib.suppress(VolumeError):
            self._write(durable=True)
        try:
            write_atomically(path, dumps_json(content).encode(), durable=False)
        except OSError:
            return None
        return str(path)

    def checkpoint_saved(self, checkpoint: Mapping[str, int] | None) -> None:
        """Report the newest checkpoint; an earlier refusal of the volume is over."""
        self._refusals = 0
        self._progress.update(checkpoint=checkpoint, checkpointProblem=None)

    def volume_refused(self, step: int, error: VolumeError) -> None:
        """Report that the volume refused rows or a checkpoint. Training continues."""
        self._refusals += 1
        if self._refusals == 1:
            lost = "without saving" if self._with_checkpoints else "without these metrics"
            self._console.log(f"warning: {error}; training continues {lost}")
            self._append("refused", {"message": str(error)}, step=step)
        if self._with_checkpoints:
            self._progress.update(checkpointProblem=f"{error} ({self._refusals} in a row)")

    def log(self, event: str, step: int, **values: Any) -> None:
        """Buffer one row, and write the buffer if the last write was more than a second ago."""
        self._append(event, values, step=step)
        if self._path is not None and time.monotonic() - self._flushed > _FLUSH_INTERVAL:
            self._flushed, self._step = time.monotonic(), step
            self._background.request()

    def _flush_in_background(self) -> None:
        self.flush(self._step, durable=False)

    def flush(self, step: int, *, durable: bool = True) -> bool:
        """Write all buffered rows. Returns False, after a report, if the volume refused.

        Args:
            durable: also sync the file, so that a checkpoint renamed later never lacks its rows.
        """
        try:
            self._write(durable=durable)
        except VolumeError as error:
            self.volume_refused(step, error)
            return False
        return True

    def _append(self, event: str, values: Mapping[str, Any], *, step: int | None = None) -> None:
        if self._path is not None:
            place = {} if step is None else {"step": step, "epoch": step // self._steps_per_epoch}
            row = {"event": event, "run": self._run, **place, **values, "time": round(time.time(), 3)}
            with self._rows:
                self._buffer += dumps_json(row).encode() + b"\n"

    def _write(self, *, durable: bool) -> None:
        """Write the buffer; what a full volume does not take stays in it."""
        if self._path is None:
            return
        with volume_errors(self._path), self._writing:
            while rows := bytes(self._buffer):
                written = os.write(self._file, rows)
                with self._rows:
                    del self._buffer[:written]
            if durable:
                sync(self._file)


def read_rows(path: Path | str) -> list[Json]:
    """Return all rows of a checkpoint directory, run by run, or of one file. Incomplete lines are skipped."""
    root = Path(path)
    files = [root] if root.is_file() else [root / _OLDER_FILE, *sorted((root / FOLDER).glob("run-*.jsonl"))]
    rows = []
    for file in files:
        for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


@dataclass(frozen=True)
class RecordedMetrics:
    """The metrics of all runs of a training, without rows whose numbers are malformed.

    Attributes:
        starts: the start row of each run, by the number of the run.
        origins: the run and step that each run resumed from, by the number of the run; None for a run from step 0.
        rows: the rows of steps, evaluations and stops, run by run.
        last_steps: the last step that counts of the newest run and of each of its ancestors, by run.
    """

    starts: dict[int, Json]
    origins: dict[int, tuple[int, int] | None]
    rows: list[Json]
    last_steps: dict[int, float]

    def counts(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row belongs to the training as if it had never been interrupted."""
        return bool(row["step"] <= self.last_steps.get(row["run"], -1))


def read_metrics(path: Path | str) -> RecordedMetrics:
    """Return the metrics in a checkpoint directory, or in the file of one run.

    A run's ancestors are the run that it resumed from, up to the step where it resumed, and so on back to a run from
    step 0. If a run does not say from which step it resumed, it has no ancestor, and a warning is printed.
    """
    starts: dict[int, Json] = {}
    origins: dict[int, tuple[int, int] | None] = {}
    rows = []
    for row in read_rows(path):
        run, step = whole(row.get("run")), whole(row.get("step"))
        if run and row.get("event") == "start":
            found = row.get("resumedFrom", "absent")
            place = [whole(found.get(name)) for name in ("run", "step")] if isinstance(found, dict) else [None]
            starts[run] = row
            if None in place and found is not None:
                said = f"warning: run {run} in {path}: resumedFrom is {str(found)[:100]}, not a run and a step"
                print(f"{said}; the steps of earlier runs are not counted", file=sys.stderr)
            origins[run] = None if None in place else (found["run"], found["step"])
        elif run and step is not None and row.get("event") in ("train", "eval", "stopped"):
            rows.append(row)
    last_steps: dict[int, float] = {}
    counted: tuple[int, float] | None = (max(origins, default=0), math.inf)
    while counted and counted[0] in origins and counted[0] not in last_steps:
        number, last = counted
        last_steps[number] = min([last, *last_steps.values()])
        counted = origins[number]
    return RecordedMetrics(starts, origins, rows, last_steps)


def effective_rows(path: Path | str, event: str | None = None) -> list[Json]:
    """Return the train and eval rows that count, in order of step: those of the newest run and of its ancestors.

    Rows that a killed run wrote after its last checkpoint, and rows that an older attempt still appends, are dropped.

    Args:
        path: a checkpoint directory, or the file of one run.
        event: ``train`` or ``eval`` to return only those rows.
    """
    found, events = read_metrics(path), (event,) if event else ("train", "eval")
    kept = [row for row in found.rows if row["event"] in events and found.counts(row)]
    return sorted(kept, key=lambda row: (row["step"], row["event"] == "eval"))


def whole(value: Any) -> int | None:
    """Return the value as the number of a run or of a step; None if it cannot be one."""
    return value if type(value) is int and 0 <= value <= _LARGEST else None
