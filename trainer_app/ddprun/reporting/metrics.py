"""The metrics of a training: ``metrics/run-N.jsonl``, one row for each start, step, test and save.

``RowsFile`` writes the file of one run, ``read_metrics`` reads those of all. Each run has its own file, because NFS
does not append atomically: rows of an older attempt that still runs would overwrite rows of the newer attempt.
"""

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddprun.files import Json, dumps_json, make_shared, share, sync, sync_directory, with_named_loss

FOLDER = "metrics"
_NAME = re.compile(r"run-(\d{6,})\.jsonl$")
_LARGEST = 10**12  # number of a run or of a step


class RowsFile:
    """The file of one run: rows are appended to a buffer, which ``write`` takes to the volume; thread-safe.

    Raises:
        FileExistsError: it exists; another process may write rows of this run.
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, run: int) -> None:
        self.path, self.run = folder / FOLDER / f"run-{run:06d}.jsonl", run
        make_shared(self.path.parent)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o664)
        share(self.path, 0o664)
        sync_directory(self.path.parent)  # else a power cut may leave a checkpoint, but not this name
        self._buffer, self._rows, self._writing = bytearray(), threading.Lock(), threading.Lock()

    def append(self, event: str, values: Mapping[str, Any], *, at: float | None = None) -> None:
        """Add one row to the buffer; ``at`` is its time, if that is not now."""
        row = {"event": event, "run": self.run, **values, "time": round(time.time() if at is None else at, 3)}
        with self._rows:
            self._buffer += dumps_json(with_named_loss(row)).encode() + b"\n"

    def write(self, *, durable: bool) -> None:
        """Write the buffer; what a full volume does not take stays in it.

        Args:
            durable: also sync the file, so that a checkpoint renamed later never lacks its rows.
        Raises:
            OSError: the volume refused.
        """
        with self._writing:
            while rows := bytes(self._buffer):
                written = os.write(self._file, rows)
                with self._rows:
                    del self._buffer[:written]
            if durable:
                sync(self._file)


def run_numbers(folder: Path) -> list[int]:
    """Return the numbers of the runs that have a file, highest first."""
    base = folder / FOLDER
    found = [int(m[1]) for path in base.iterdir() if (m := _NAME.match(path.name))] if base.is_dir() else []
    return sorted(found, reverse=True)


def read_rows(path: Path | str) -> list[Json]:
    """Return all rows of a checkpoint directory or its folder ``metrics``, run by run, or of one file.

    Incomplete lines are skipped.
    """
    root = Path(path)
    folder = root / FOLDER if (root / FOLDER).is_dir() else root  # a copy of the folder may have any name
    files = [root] if root.is_file() else sorted(folder.glob("run-*.jsonl"))
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
        rows: the rows of steps, tests, saves and stops, run by run.
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
        elif run and step is not None and row.get("event") in ("train", "eval", "save", "stopped"):
            rows.append(row)
    last_steps: dict[int, float] = {}
    counted: tuple[int, float] | None = (max(origins, default=0), math.inf)
    while counted and counted[0] in origins and counted[0] not in last_steps:
        number, last = counted
        last_steps[number] = min([last, *last_steps.values()])
        counted = origins[number]
    return RecordedMetrics(starts, origins, rows, last_steps)


def whole(value: Any) -> int | None:
    """Return the value as the number of a run or of a step; None if it cannot be one."""
    return value if type(value) is int and 0 <= value <= _LARGEST else None
