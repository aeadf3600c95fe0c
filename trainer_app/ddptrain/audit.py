"""``--audit DIR``: every rank writes down which samples it used, so that a proof need not trust what it proves.

``train`` makes it, and hands ``batches`` and ``evaluate`` the callbacks that write to it; ``proofs`` reads all ranks'
files together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddptrain.errors import volume_error

Indices = npt.NDArray[np.int64]


class Audit:
    """One rank's file below ``folder``: a row per piece of work, with the indices in the order of their use."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("a", buffering=1)
        except OSError as error:
            raise volume_error(error, self._path) from error

    def used(self, event: str, step: int, indices: Indices) -> None:
        """Write one row.

        Args:
            event: ``train`` or ``eval``.
            step: completed steps before.
        """
        self._stream.write(json.dumps({"event": event, "step": step, "indices": indices.tolist()}) + "\n")


def read(folder: Path) -> dict[str, dict[int, Indices]]:
    """Event to step to the indices that all ranks used together, rank by rank."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("rank-*.jsonl"), key=lambda p: int(p.stem.partition("-")[2])):
        for line in path.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            found[row["event"]][row["step"]] += row["indices"]
    return {event: {at: np.array(i, np.int64) for at, i in sorted(steps.items())} for event, steps in found.items()}
