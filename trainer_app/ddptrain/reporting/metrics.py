"""What the trainer logs: rows of the metrics (``ddprun.reporting.metrics``), the progress and the console's lines."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun.errors import VolumeError, volume_errors
from ddprun.files import BackgroundWrite
from ddprun.reporting.console import Console
from ddprun.reporting.metrics import FOLDER, RowsFile
from ddprun.reporting.progress import ProgressRecord

_FLUSH_INTERVAL = 1.0  # seconds between writes of buffered rows, for readers that follow the file
_SPEED_SMOOTHING = 0.9  # weight of the past in the moving average of the speed


class MetricsLogger:
    """Logs one rank's completed work: to the progress report, the console, and the run's metrics once these are open.

    Only rank 0 of a training with a checkpoint directory opens them. The rows are buffered and written about once a
    second, by a thread, and before each checkpoint: that save is a phase with the volume's limit, while a step must not
    wait for the volume. A volume that refuses them does not stop the training: the rows stay buffered, the first
    refusal is printed, and the progress report shows it as ``checkpointProblem``.
    """

    def __init__(self, progress: ProgressRecord, console: Console, *, epochs: int, steps_per_epoch: int) -> None:
        self._progress, self._console = progress, console
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._file: RowsFile | None = None
        self._flushed, self._refusals = time.monotonic(), 0
        self._background = BackgroundWrite(self._flush_in_background)
        self._step = 0  # of the newest row, when a write was requested
        self._speed = 0.0  # samples per second, smoothed
        progress.update(phase="setup", totalEpochs=epochs, totalSteps=epochs * steps_per_epoch)

    def open(self, folder: Path, run: int, **start: Any) -> None:
        """Open ``folder/metrics/run-N.jsonl``, and write the ``start`` row to disk.

        Args:
            run: the number N, which is also in every row.
            start: further fields of the ``start`` row.
        Raises:
            VolumeError: the file cannot be opened or written.
        """
        with volume_errors(folder / FOLDER):
            self._file = RowsFile(folder, run)
        self._append("start", start)
        self._write(durable=True)

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

    def not_finite(self, step: int, *, loss: float, learning_rate: float) -> None:
        """Log a loss that is not finite."""
        self.log("not finite", step, loss=loss, lr=learning_rate)
        self.flush(step)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a save, for which all ranks wait: the next report has its time."""
        return self._progress.saving()

    def checkpoint_saved(self, checkpoint: Mapping[str, int] | None) -> None:
        """Report the newest checkpoint; an earlier refusal of the volume is over."""
        self._refusals = 0
        self._progress.update(checkpoint=checkpoint, checkpointProblem=None)

    def volume_refused(self, step: int, error: VolumeError) -> None:
        """Report that the volume refused rows or a checkpoint. Training continues."""
        self._refusals += 1
        if self._refusals == 1:
            self._console.log(f"warning: {error}; training continues without saving")
            self._append("refused", {"message": str(error)}, step=step)
        self._progress.update(checkpointProblem=f"{error} ({self._refusals} in a row)")

    def log(self, event: str, step: int, **values: Any) -> None:
        """Buffer one row, and write the buffer if the last write was more than a second ago."""
        self._append(event, values, step=step)
        if self._file is not None and time.monotonic() - self._flushed > _FLUSH_INTERVAL:
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
        if self._file is not None:
            place = {} if step is None else {"step": step, "epoch": step // self._steps_per_epoch}
            self._file.append(event, {**place, **values})

    def _write(self, *, durable: bool) -> None:
        if self._file is not None:
            with volume_errors(self._file.path):
                self._file.write(durable=durable)
