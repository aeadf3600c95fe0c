"""The training set as one uint8 tensor on the device; a batch is an index, a slice and a cast. No DataLoader.

``train`` asks it for this rank's part of a global batch; ``order`` says which samples these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ddptrain.order import Schedule, epoch_order, shard, shift_of

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, in units of 255


@dataclass(frozen=True)
class Batch:
    """This rank's part of one global batch: ``images`` (n, 1, 28, 28), ``labels`` (n,); n may be 0."""

    images: torch.Tensor
    labels: torch.Tensor
    epoch: int
    global_count: int


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 pixels to zero mean and unit variance."""
    return (pixels.to(dtype) - 255 * MEAN).mul_(1 / (255 * STD))


class TrainingBatches:
    """Serves the batches of a schedule to one rank."""

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.uint8],
        schedule: Schedule,
        *,
        shift: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._schedule, self._shift, self._dtype = schedule, shift, dtype
        self._rank, self._world_size = rank, world_size
        # The border lets a shift be a slice of the stored image instead of an operation on it.
        pixels = torch.from_numpy(images.copy()).to(device)
        self._images = functional.pad(pixels, (shift, shift, shift, shift))
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> Batch:
        """This rank's part of the batch that follows ``step`` completed steps."""
        epoch, first, end = self._schedule.bounds(step)
        if epoch != self._epoch:
            order = epoch_order(self._schedule.samples, self._schedule.seed, epoch)
            self._epoch, self._order = epoch, torch.from_numpy(order).to(self._images.device)
        part = shard(end - first, self._rank, self._world_size)
        chosen = self._order[first + part.start : first + part.stop]
        down, right = shift_of(self._schedule.seed, step, self._shift)
        top, left = self._shift - down, self._shift - right
        pixels = self._images[chosen, top : top + 28, left : left + 28]
        return Batch(normalise(pixels, self._dtype).unsqueeze(1), self._labels[chosen], epoch, end - first)
