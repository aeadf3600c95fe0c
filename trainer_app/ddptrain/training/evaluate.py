"""Evaluation on the test set, divided among the ranks without padding: every sample counts once.

The set is divided into fixed chunks, and each rank evaluates whole chunks, so that a chunk has the same shape on every
rank. The exchanged tensors have one element per chunk or sample, filled in by one rank and zero on the others, and all
ranks sum them in the same order. The same weights therefore give the same accuracy and loss, bit for bit, at any number
of ranks (with the same number of threads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from ddptrain.data.batches import normalise
from ddptrain.data.sampling import shard
from ddptrain.distributed.process_group import Group

CHUNK = 250


@dataclass(frozen=True)
class Evaluation:
    """Sums over the whole set, from which accuracy and loss are computed once."""

    correct: int
    samples: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that manifests and termination reports record."""
        return {"accuracy": self.accuracy, "loss": self.loss, "correct": self.correct, "samples": self.samples}


def chunks_of(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return (first, end) of each of the rank's chunks."""
    chunks = [(first, min(first + CHUNK, samples)) for first in range(0, samples, CHUNK)]
    return chunks[shard(len(chunks), rank, world_size)]


def forward_chunks(
    model: nn.Module, images: npt.NDArray[np.uint8], group: Group
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first, end, logits) of each of this rank's chunks."""
    dtype = next(model.parameters()).dtype
    for first, end in chunks_of(len(images), group.rank, group.world_size):
        group.heartbeat.touch()
        pixels = torch.from_numpy(images[first:end].copy()).to(group.device)
        yield first, end, model(normalise(pixels, dtype).unsqueeze(1))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.uint8],
    group: Group,
    on_use: Callable[[npt.NDArray[np.int64]], None] | None = None,
) -> Evaluation:
    """Return the evaluation of the unwrapped ``model``; collective, with the same result on every rank.

    Args:
        on_use: called with the indices of the samples that this rank evaluates.
    Raises:
        AssertionError: the ranks did not evaluate every sample exactly once, which is a bug in this module.
    """
    losses = torch.zeros(-(-len(images) // CHUNK), dtype=torch.float64)
    seen = torch.zeros(len(images), dtype=torch.float64)
    correct = torch.zeros(len(images), dtype=torch.float64)
    for first, end, logits in forward_chunks(model, images, group):
        targets = torch.from_numpy(labels[first:end].astype(np.int64)).to(group.device)
        losses[first // CHUNK] += float(functional.cross_entropy(logits.double(), targets, reduction="sum"))
        correct[first:end] += (logits.argmax(1) == targets).cpu()
        seen[first:end] += 1
        if on_use:
            on_use(np.arange(first, end))
    summed = group.sum(torch.cat([losses, seen, correct]).to(group.device)).cpu()
    losses, seen, correct = torch.split(summed, [len(losses), len(seen), len(correct)])
    assert_once(seen)
    return Evaluation(int(correct.sum()), len(images), math.fsum(losses.tolist()))


def assert_once(seen: torch.Tensor) -> None:
    """Raise AssertionError unless all ranks together saw every sample exactly once."""
    wrong = int((seen != 1).sum())
    assert wrong == 0, f"{wrong} of {len(seen)} samples were not evaluated exactly once"
