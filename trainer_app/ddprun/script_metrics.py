"""The metrics of a program: rows of what it reports, in the format and with the lineage of ``reporting.metrics``.

A report costs microseconds: its row waits in memory until a thread writes it. A volume that is full, or that does not
answer, delays no step and ends no training.
"""

import atexit
import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddprun import checkpoint_files
from ddprun.distributed.default_group import rank_and_size
from ddprun.errors import VolumeError, volume_error, volume_errors
from ddprun.files import BackgroundWrite, Json, make_shared
from ddprun.reporting.metrics import RowsFile, run_numbers

_INTERVAL = 1.0  # seconds between writes, for readers that follow the file
_WAITING = 10_000  # rows in memory at most, while the volume takes none
_UNTHINNED = 100_000  # rows that are all written; then every 2nd up to twice as many, then every 4th, and so on
_PATIENCE = 5.0  # seconds at the end of the process for a volume to take the last rows


class ScriptMetrics:
    """The rows of one run of a program, which rank 0 writes. The run gets its number when its file is made.

    Args:
        facts: further fields of the row of the start.
        on_refused: takes the error whenever the volume refuses rows; else it is printed.
    Attributes:
        folder: the checkpoint directory; the file is ``metrics/run-N.jsonl`` in it.
        total_steps: how many steps the training will have, if the program has said so.
    """

    def __init__(
        self,
        folder: Path,
        *,
        facts: Mapping[str, Any] = {},
        on_refused: Callable[[VolumeError], None] | None = None,
    ) -> None:
        self.folder, self._facts, self._on_refused = folder, facts, on_refused
        self.total_steps: int | None = None
        self._origin: list[Json | None] = []  # what the run resumed from, if that is known
        self._reported = collections.Counter[str]()
        self._rows = collections.deque[tuple[str, Mapping[str, Any], float]]()
        self._dropped = 0
        self._file: RowsFile | None = None
        self._writing, self._background = threading.Lock(), BackgroundWrite(lambda: self.flush(durable=False))
        self._requested, self._refused, self._process = 0.0, False, os.getpid()
        atexit.register(self._end)

    def resumed(self, checkpoint: Json | None) -> None:
        """Take note that the run continues from this checkpoint; None if it begins at step 0."""
        self._origin = [checkpoint]

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Add a row, which has a ``step``; never waits and never raises."""
        if os.getpid() != self._process:
            return  # a process that the rank has forked, without the thread that writes
        self._reported[event] += 1
        count = self._reported[event]
        if count % (1 << (count // _UNTHINNED).bit_length()):
            return
        if len(self._rows) < _WAITING:
            self._rows.append((event, values, time.time()))
        else:
            self._dropped += 1
        if time.monotonic() - self._requested >= _INTERVAL:
            self._requested = time.monotonic()
            self._background.request()

    def reserve(self) -> int:
        """Make the file of the run, unless there is one, and return the run's number.

        Raises:
            VolumeError: it cannot be made.
        """
        with volume_errors(self.folder), self._writing:
            return self._opened().run

    def flush(self, *, durable: bool = True) -> bool:
        """Write all rows. Returns False if the volume refused, and keeps what it did not take.

        Args:
            durable: also sync the file, so that a checkpoint saved later never lacks its rows.
        """
        try:
            with self._writing:
                if self._file is None and not self._rows:
                    return True
                file = self._opened()
                file.write(durable=False)  # what the volume has refused before
                while self._rows:
                    event, values, at = self._rows.popleft()
                    file.append(event, values, at=at)
                if dropped := self._dropped:
                    self._dropped -= dropped
                    file.append("dropped", {"rows": dropped})
                file.write(durable=durable)
        except OSError as error:
            problem = volume_error(error, self.folder)
            if self._on_refused:
                self._on_refused(problem)
            elif not self._refused:
                print(f"warning: {problem}; the training continues without its metrics", file=sys.stderr, flush=True)
            self._refused = True
            return False
        self._refused = False
        return True

    def _opened(self) -> RowsFile:
        while self._file is None:
            make_shared(self.folder)
            number = max([0, *run_numbers(self.folder), *checkpoint_files.run_numbers(self.folder)]) + 1
            try:
                file = RowsFile(self.folder, number)
            except FileExistsError:
                continue  # another start was faster
            start = {"worldSize": rank_and_size()[1], "totalSteps": self.total_steps, **self._facts}
            own = checkpoint_files.owner(os.environ)
            start |= {name: own[name] for name in ("attempt", "life")}
            file.append("start", {**start, "resumedFrom": self._resumed_from(number)})
            self._file = file
        return self._file

    def _resumed_from(self, number: int) -> Json | None:
        """Return what the run continues; if only the script knows, the newest run before it, up to its first row."""
        if self._origin:
            return self._origin[0]
        earlier = [run for run in run_numbers(self.folder) if run < number]
        first = self._rows[0][1]["step"] if self._rows else 0
        return {"run": earlier[0], "step": first - 1} if earlier and first > 1 else None

    def _end(self) -> None:
        if os.getpid() == self._process and self._rows:
            self._background.request()
            self._background.wait(_PATIENCE)
