"""The test set, sharded without padding: every sample is counted once, whatever the number of ranks.

The set is cut into fixed chunks and each rank takes whole chunks: a chunk has the same shape wherever it is computed,
so the same weights give the same accuracy on one rank and on seven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from ddptrain.batches import normalise
from ddptrain.group import Group
from ddptrain.order import shard

CHUNK = 250


@dataclass(frozen=True)
class Evaluation:
    """Sums over the whole set: integers and one float, never an average of averages."""

    correct: int
    samples: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples


def chunks_of(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """(first, end) of each chunk that is this rank's."""
    chunks = [(first, min(first + CHUNK, samples)) for first in range(0, samples, CHUNK)]
    return chunks[shard(len(chunks), rank, world_size)]


@torch.no_grad()
def evaluate(
    model: nn.Module, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], group: Group
) -> Evaluation:
    """Accuracy and mean cross-entropy of the unwrapped ``model``; collective, the same result on every rank.

    Raises:
        AssertionError: the ranks together did not see every sample exactly once (a bug here).
    """
    dtype = next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64)
    for first, end in chunks_of(len(images), group.rank, group.world_size):
        pixels = torch.from_numpy(images[first:end].copy()).to(group.device)
        wanted = torch.from_numpy(labels[first:end].astype(np.int64)).to(group.device)
        logits = model(normalise(pixels, dtype).unsqueeze(1))
        sums[0] += int((logits.argmax(1) == wanted).sum())
        sums[1] += end - first
        sums[2] += float(functional.cross_entropy(logits.double(), wanted, reduction="sum"))
    correct, samples, loss_sum = group.sum(sums.to(group.device)).tolist()
    assert samples == len(images), f"evaluated {samples} of {len(images)} samples"
    return Evaluation(int(correct), int(samples), loss_sum)
