"""Rank 0's ``metrics.jsonl``, and what else is written down of a run that is no checkpoint.

``recorder`` tells it what happened, and when rows must be on the disk. A volume that refuses costs rows, not the run.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.errors import VolumeError, volume_error
from ddptrain.files import write_atomically
from ddptrain.finite import dumps
from ddptrain.metrics import FILE_NAME, MetricsLog
from ddptrain.progress import Progress

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
