"""Evaluation on the test set, divided among the ranks without padding: every sample counts once.

The set is on the device, and the host reads one result. On a CPU it is divided into fixed chunks, and each rank
evaluates whole chunks, so that a chunk has the same shape on every rank; a GPU evaluates its rank's chunks in one pass.
The exchanged tensors have one element per sample, filled in by one rank and zero on the others. On CPUs the same
weights therefore give the same accuracy and loss, bit for bit, at any number of ranks (with the same number of
threads).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from ddprun.distributed.process_group import Group
from ddptrain.data.batches import normalise
from ddptrain.data.sampling import shard

CHUNK = 250
GPU_PASS = 20_000  # samples of one pass on a GPU, at most: the cnn needs 90 KB of memory for each


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


@dataclass(frozen=True)
class ResidentSet:
    """A test set on the device: ``images`` (n, 28, 28) uint8, ``labels`` (n,) int64."""

    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> "ResidentSet":
        """Copy a test set to the device."""
        return cls(resident(images, device), torch.from_numpy(labels.astype(np.int64)).to(device))


def resident(images: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Return images on the device; a copy, because torch warns of arrays that cannot be written."""
    return torch.from_numpy(images.copy()).to(device)


def chunks_of(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return (first, end) of each of the rank's chunks."""
    chunks = [(first, min(first + CHUNK, samples)) for first in range(0, samples, CHUNK)]
    return chunks[shard(len(chunks), rank, world_size)]


def passes_of(chunks: list[tuple[int, int]], device: torch.device) -> list[tuple[int, int]]:
    """Return (first, end) of each forward pass over consecutive chunks."""
    if device.type == "cpu":
        return chunks
    together = GPU_PASS // CHUNK
    parts = [chunks[first : first + together] for first in range(0, len(chunks), together)]
    return [(part[0][0], part[-1][1]) for part in parts]


def forward_chunks(model: nn.Module, images: torch.Tensor, group: Group) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first, end, logits) of each of this rank's passes over ``images``, which are on the device."""
    dtype = next(model.parameters()).dtype
    for first, end in passes_of(chunks_of(len(images), group.rank, group.world_size), images.device):
        group.heartbeat.touch()
        yield first, end, model(normalise(images[first:end], dtype).unsqueeze(1))


@torch.no_grad()
def evaluate(model: nn.Module, test: ResidentSet, group: Group) -> Evaluation:
    """Return the evaluation of the unwrapped ``model``; collective, with the same result on every rank.

    Raises:
        AssertionError: the ranks did not evaluate every sample exactly once, which is a bug in this module.
    """
    found = torch.zeros(3, len(test.labels), dtype=torch.float64, device=group.device)
    losses, correct, seen = found
    for first, end, logits in forward_chunks(model, test.images, group):
        targets = test.labels[first:end]
        losses[first:end] += functional.cross_entropy(logits.double(), targets, reduction="none")
        correct[first:end] += logits.argmax(1) == targets
        seen[first:end] += 1
    losses, correct, seen = group.sum(found).cpu()
    assert_once(seen)
    return Evaluation(int(correct.sum()), len(seen), math.fsum(losses.tolist()))


@torch.no_grad()
def probabilities(model: nn.Module, images: npt.NDArray[np.uint8], group: Group) -> torch.Tensor:
    """Return the probability of each class (N, 10) for each image, on the CPU of every rank; collective."""
    table = torch.zeros(len(images), 11, dtype=torch.float64)
    for first, end, logits in forward_chunks(model, resident(images, group.device), group):
        table[first:end, :10] += logits.double().softmax(1).cpu()
        table[first:end, 10] += 1
    # One rank fills each row and the others add 0, so the sum is exact.
    table = group.sum(table.to(group.device)).cpu()
    assert_once(table[:, 10])
    return table[:, :10]


def assert_once(seen: torch.Tensor) -> None:
    """Raise AssertionError unless all ranks together saw every sample exactly once."""
    wrong = int((seen != 1).sum())
    assert wrong == 0, f"{wrong} of {len(seen)} samples were not evaluated exactly once"
