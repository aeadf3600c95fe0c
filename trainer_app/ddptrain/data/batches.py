"""The training set as one uint8 tensor on the device; a batch is an index, a slice and a cast. No DataLoader.

``train`` asks it for a global batch, ``sync`` for the pieces of it that are this rank's; ``order`` says which samples
these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ddptrain.data.sampling import Schedule, epoch_order, shift_of

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, in units of 255

# Told (step, samples) of every piece that is made: the audit that a comparison reads.
OnUse = Callable[[int, npt.NDArray[np.int64]], None]


@dataclass(frozen=True)
class Piece:
    """Some samples of a global batch: ``images`` (n, 1, 28, 28), ``labels`` (n,), on the device; n may be 0."""

    images: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks: ``count`` of them, cut by ``piece``."""

    step: int
    count: int
    piece: Callable[[slice], Piece]


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 pixels to zero mean and unit variance, in one pass: the operations of a step are few and short."""
    return torch.add(torch.tensor(-MEAN / STD, dtype=dtype), pixels, alpha=1 / (255 * STD))


class TrainingBatches:
    """Serves the global batches of a schedule.

    Args:
        shift: most pixels of a step's random shift; the same for the whole global batch.
        on_use: told which samples each piece holds.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.uint8],
        schedule: Schedule,
        *,
        shift: int,
        device: torch.device,
        dtype: torch.dtype,
        on_use: OnUse | None = None,
    ) -> None:
        self._schedule, self._shift, self._dtype, self._on_use = schedule, shift, dtype, on_use
        # The border lets a shift be a slice of the stored image instead of an operation on it.
        pixels = torch.from_numpy(images.copy()).to(device)
        self._images = functional.pad(pixels, (shift, shift, shift, shift))
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> GlobalBatch:
        """The batch that follows ``step`` completed steps."""
        _, first, end = self._schedule.bounds(step)
        return GlobalBatch(step, end - first, lambda part: self._piece(step, part))

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Which training samples the global batch after ``step`` completed steps holds, in its order."""
        epoch, first, end = self._schedule.bounds(step)
        return epoch_order(self._schedule.samples, self._schedule.seed, epoch)[first:end]

    def _piece(self, step: int, part: slice) -> Piece:
        epoch, first, _ = self._schedule.bounds(step)
        if epoch != self._epoch:
            order = epoch_order(self._schedule.samples, self._schedule.seed, epoch)
            self._epoch, self._order = epoch, torch.from_numpy(order).to(self._images.device)
        chosen = self._order[first + part.start : first + part.stop]
        if self._on_use:
            self._on_use(step, chosen.cpu().numpy())
        down, right = shift_of(self._schedule.seed, step, self._shift)
        top, left = self._shift - down, self._shift - right
        # Whole images first, each copied in one piece; the shift costs nothing more than the cast that follows.
        pixels = self._images.index_select(0, chosen)[:, top : top + 28, left : left + 28]
        return Piece(normalise(pixels, self._dtype).unsqueeze(1), self._labels.index_select(0, chosen))
