"""Evaluation on the test set, divided among the ranks without padding: every sample counts once.

The set is on the device, and the host reads one result. It is divided into fixed chunks, and each rank evaluates whole
chunks, so that a chunk has the same shape on every rank. The exchanged table has a row for each sample, filled in by
one rank and zero on the others. On CPUs the same weights therefore give the same accuracy and loss, bit for bit, at any
number of ranks (with the same number of threads).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ddprun.distributed.process_group import Group
from ddptrain.data.batches import normalise
from ddptrain.data.mnist import Dataset
from ddptrain.data.sampling import shard

CHUNK = 250


def test_set(dataset: Dataset, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the test set on the device: images (n, 28, 28) uint8, labels (n,) int64."""
    images = dataset.test_images.copy()  # torch warns of arrays that cannot be written
    return torch.from_numpy(images).to(device), torch.from_numpy(dataset.test_labels.astype(np.int64)).to(device)


def chunks_of(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return (first, end) of each of the rank's chunks."""
    chunks = [(first, min(first + CHUNK, samples)) for first in range(0, samples, CHUNK)]
    return chunks[shard(len(chunks), rank, world_size)]


@torch.no_grad()
def logits_of(model: nn.Module, images: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the logits (n, 10) float64 of images on the device; collective, with the same result on every rank.

    Args:
        model: the bare model, not wrapped.

    Raises:
        AssertionError: the ranks did not evaluate every sample exactly once, which is a bug in this module.
    """
    dtype = next(model.parameters()).dtype
    table = torch.zeros(len(images), 11, dtype=torch.float64, device=group.device)  # logits, and how often
    for first, end in chunks_of(len(images), group.rank, group.world_size):
        group.heartbeat.touch()
        table[first:end, :10] += model(normalise(images[first:end], dtype).unsqueeze(1))
        table[first:end, 10] += 1
    table = group.sum(table)  # one rank fills each row and the others add 0, so the sum is exact
    wrong = int((table[:, 10] != 1).sum())
    assert wrong == 0, f"{wrong} of {len(images)} samples were not evaluated exactly once"
    return table[:, :10]


def evaluate(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Return accuracy, loss, correct and samples, as manifests record them, from what ``logits_of`` has returned."""
    losses = functional.cross_entropy(logits, labels, reduction="none")
    correct, samples = int((logits.argmax(1) == labels).sum()), len(labels)
    loss = math.fsum(losses.tolist()) / samples
    return {"accuracy": correct / samples, "loss": loss, "correct": correct, "samples": samples}
