"""Which sample is used when: one global order per epoch, cut into global batches, each split over the ranks.

Pure. Everything is a function of (seed, epoch, position), never of the rank or the number of ranks, so no random state
is ever saved, and a run resumed at any step, with any number of ranks, sees the very same global batches.

``--audit DIR``: every rank writes down which samples it used, so that a proof need not trust what it proves.

``train`` makes it, and hands ``batches`` and ``evaluate`` the callbacks that write to it; ``proofs`` reads all ranks'
files together.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddptrain.errors import volume_error


@dataclass(frozen=True)
class Cursor:
    """A place in the run: ``position`` samples of epoch ``epoch`` (from 0) are done."""

    epoch: int
    position: int


@dataclass(frozen=True)
class Schedule:
    """How ``samples`` are walked through: ``epochs`` passes in global batches of ``batch``, the last one shorter."""

    samples: int
    batch: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def cursor(self, step: int) -> Cursor:
        """Where the run stands after ``step`` completed steps."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Cursor(epoch, within * self.batch)

    def ends_epoch(self, step: int) -> bool:
        """True if the ``step``-th completed step (from 1) was the last of its epoch."""
        return step % self.steps_per_epoch == 0

    def bounds(self, step: int) -> tuple[int, int, int]:
        """(epoch, first, end) of the global batch that takes the run from ``step`` to ``step + 1``."""
        cursor = self.cursor(step)
        return cursor.epoch, cursor.position, min(cursor.position + self.batch, self.samples)


def derived_seed(seed: int, *what: int | str) -> int:
    """A 63-bit seed for one purpose, independent of every other purpose's."""
    text = ":".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The global order of one epoch: a permutation of range(samples)."""
    # PCG64's raw stream is fixed by NumPy's compatibility policy; the shuffling methods on top of it are not,
    # and a resume may meet another NumPy. Sorting raw 64-bit keys depends on the raw stream alone.
    keys = np.random.PCG64(derived_seed(seed, "order", epoch)).random_raw(samples)
    return np.argsort(keys, kind="stable").astype(np.int64)


def shard(count: int, rank: int, world_size: int) -> slice:
    """The contiguous part of ``count`` items that is ``rank``'s: sizes differ by one at most, nothing is dropped."""
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


def micro_shards(count: int, rank: int, world_size: int, accum: int) -> list[slice]:
    """``rank``'s part of ``count`` items, cut into ``accum`` micro-batches in the same way.

    A part of fewer items is cut into as many as it has: empty micro-batches would cost time and change nothing. Only a
    rank without any items has an empty one, for its place in the exchange.
    """
    part = shard(count, rank, world_size)
    size = part.stop - part.start
    pieces = max(1, min(accum, size))
    cuts = [shard(size, index, pieces) for index in range(pieces)]
    return [slice(part.start + cut.start, part.start + cut.stop) for cut in cuts]


def shift_of(seed: int, step: int, most: int) -> tuple[int, int]:
    """The (down, right) shift in pixels, each in [-most, most], that augments the whole global batch of a step."""
    if most == 0:
        return 0, 0
    side = 2 * most + 1
    down, right = divmod(derived_seed(seed, "shift", step) % (side * side), side)
    return down - most, right - most


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
