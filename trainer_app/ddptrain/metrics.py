"""``metrics.jsonl``: one row per step, evaluation and start, over all runs of the job.

``journal`` appends, on rank 0, beside the checkpoints or, where none are kept, in a directory of its own;
``effective_rows`` reads the history as if no run had ever been interrupted, for ``trials``, ``bench`` and people.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.errors import volume_error
from ddptrain.files import share
from ddptrain.finite import dumps

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
