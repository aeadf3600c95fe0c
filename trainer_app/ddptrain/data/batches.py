"""The training set as one uint8 tensor on the device; a batch is an index, a slice and a cast, without a DataLoader.

The trainer takes one global batch per step, and the gradient synchronization this rank's pieces of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ddptrain.data.mnist import Images
from ddptrain.data.sampling import Schedule, epoch_order, shift_of

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, in units of 255


Piece = tuple[torch.Tensor, torch.Tensor]  # images (n, 1, 28, 28) and labels (n,) on the device; n may be 0


@dataclass(frozen=True)
class GlobalBatch:
    """The ``count`` samples of one optimizer step over all ranks; ``piece`` returns a slice of them."""

    count: int
    piece: Callable[[slice], Piece]


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 pixels scaled to zero mean and unit variance, in a single operation."""
    return torch.add(torch.tensor(-MEAN / STD, dtype=dtype), pixels, alpha=1 / (255 * STD))


class TrainingBatches:
    """Returns the global batches of a schedule.

    Args:
        shift: maximum of a step's random shift in pixels; one shift for the whole global batch.
    """

    def __init__(
        self, images: Images, labels: Images, schedule: Schedule, *,
        shift: int, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._schedule, self._shift, self._dtype = schedule, shift, dtype
        # With a border, a shift is a slice of the stored image.
        bordered = np.zeros((len(images), *(side + 2 * shift for side in images.shape[1:])), np.uint8)
        bordered[:, shift : shift + images.shape[1], shift : shift + images.shape[2]] = images
        self._images = torch.from_numpy(bordered).to(device)
        self._labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> GlobalBatch:
        """Return the global batch after ``step`` completed steps."""
        _, first, end = self._schedule.bounds(step)
        return GlobalBatch(end - first, lambda part: self._piece(step, part))

    def _piece(self, step: int, part: slice) -> Piece:
        epoch, first, _ = self._schedule.bounds(step)
        if epoch != self._epoch:
            order = epoch_order(self._schedule.samples, self._schedule.seed, epoch)
            self._epoch, self._order = epoch, torch.from_numpy(order).to(self._images.device)
        chosen = self._order[first + part.start : first + part.stop]
        down, right = shift_of(self._schedule.seed, step, self._shift)
        top, left = self._shift - down, self._shift - right
        # Whole images are gathered first, each copied in one piece; the shift is then part of the cast.
        pixels = self._images.index_select(0, chosen)[:, top : top + 28, left : left + 28]
        return normalise(pixels, self._dtype).unsqueeze(1), self._labels.index_select(0, chosen)
