"""Which sample is used when: one global order per epoch, divided into global batches, each divided among the ranks.

Everything is a pure function of (seed, epoch, position), never of the rank or the number of ranks. No random state is
saved, and a run resumed at any step with any number of ranks uses the same global batches.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """``epochs`` passes over ``samples`` samples in global batches of ``batch``, the last one of each epoch shorter."""

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

    def ends_epoch(self, step: int) -> bool:
        """Return whether step number ``step`` (from 1) is the last of its epoch."""
        return step % self.steps_per_epoch == 0

    def bounds(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, first, end) of the global batch after ``step`` completed steps."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.batch
        return epoch, first, min(first + self.batch, self.samples)


def derived_seed(seed: int, *what: int | str) -> int:
    """Return a 63-bit seed for one purpose, independent of the seeds for other purposes."""
    text = ":".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """Return the global order of one epoch: a permutation of range(samples)."""
    # NumPy's compatibility policy fixes PCG64's raw stream, but not the shuffling methods, and a run may resume with
    # another version of NumPy. Sorting raw 64-bit keys depends on the raw stream alone.
    keys = np.random.PCG64(derived_seed(seed, "order", epoch)).random_raw(samples)
    return np.argsort(keys, kind="stable").astype(np.int64)


def shard(count: int, rank: int, world_size: int) -> slice:
    """Return ``rank``'s contiguous part of ``count`` items; sizes differ by at most one, and no item is dropped."""
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


def micro_shards(count: int, rank: int, world_size: int, accum: int) -> list[slice]:
    """Return ``rank``'s part of ``count`` items divided into ``accum`` micro-batches, or fewer, so that none is empty.

    A rank without any item gets one empty micro-batch, because it takes part in the exchange.
    """
    part = shard(count, rank, world_size)
    size = part.stop - part.start
    pieces = max(1, min(accum, size))
    cuts = [shard(size, index, pieces) for index in range(pieces)]
    return [slice(part.start + cut.start, part.start + cut.stop) for cut in cuts]


def shift_of(seed: int, step: int, most: int) -> tuple[int, int]:
    """Return the (down, right) shift of a step's global batch in pixels, each in [-most, most]."""
    if most == 0:
        return 0, 0
    side = 2 * most + 1
    down, right = divmod(derived_seed(seed, "shift", step) % (side * side), side)
    return down - most, right - most
