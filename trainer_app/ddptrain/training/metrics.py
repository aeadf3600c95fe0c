"""What the trainer logs: rows of the metrics (``ddprun.script_metrics``), the progress and the console's lines."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddprun.errors import VolumeError
from ddprun.files import Json
from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddprun.script_metrics import ScriptMetrics

_SPEED_SMOOTHING = 0.9  # weight of the past in the moving average of the speed


class MetricsLogger:
    """Logs one rank's completed work: to the progress report, the console, and the run's metrics once these are open.

    Only rank 0 of a training with a checkpoint directory opens them. A volume that refuses rows does not stop the
    training: the first refusal is printed, and the progress report shows it as ``checkpointProblem``.
    """

    def __init__(self, progress: ProgressRecord, console: Console, *, epochs: int, steps_per_epoch: int) -> None:
        self._progress, self._console = progress, console
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._rows: ScriptMetrics | None = None
        self._step, self._refusals = 0, 0
        self._speed = 0.0  # samples per second, smoothed
        progress.update(phase="setup", totalEpochs=epochs, totalSteps=epochs * steps_per_epoch)

    def open(self, folder: Path, resumed_from: Json | None, **facts: Any) -> int:
        """Make the file of the metrics in ``folder``, with its row of the start, and return the number of the run.

        Args:
            facts: further fields of that row.
        Raises:
            VolumeError: the file cannot be made.
        """
        self._rows = ScriptMetrics(folder, facts=facts, on_refused=self.volume_refused)
        self._rows.total_steps = self._epochs * self._steps_per_epoch
        self._rows.resumed(resumed_from)
        number = self._rows.reserve()
        self._rows.flush()
        return number

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

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a save, for which all ranks wait: the next report has its time."""
        return self._progress.saving()

    def checkpoint_saved(self, checkpoint: Mapping[str, int] | None) -> None:
        """Report the newest checkpoint; an earlier refusal of the volume is over."""
        self._refusals = 0
        self._progress.update(checkpoint=checkpoint, checkpointProblem=None)

    def volume_refused(self, error: VolumeError) -> None:
        """Report that the volume refused rows or a checkpoint. Training continues."""
        self._refusals += 1
        if self._refusals == 1:
            self._console.log(f"warning: {error}; training continues without saving")
            self.log("refused", self._step, message=str(error))
        self._progress.update(checkpointProblem=f"{error} ({self._refusals} in a row)")

    def log(self, event: str, step: int, **values: Any) -> None:
        """Add one row, which a thread writes within about a second."""
        self._step = step
        if self._rows is not None:
            self._rows.log(event, {"step": step, "epoch": step // self._steps_per_epoch, **values})

    def flush(self) -> bool:
        """Write all rows to the disk. Returns False, after a report, if the volume refused."""
        return self._rows is None or self._rows.flush()
