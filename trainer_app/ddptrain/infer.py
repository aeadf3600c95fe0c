"""The ``infer`` verb: a saved model's answer for every sample, computed by one rank or many, written in index order.

Alone, or one process per rank under torchrun; ``worker`` calls it as it does a training. Each rank judges whole chunks,
as in ``evaluate``; rank 0, which alone needs to see the checkpoint, merges and writes. The file is the same, byte for
byte, whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ddptrain.config import Config
from ddptrain.evaluate import assert_once, forward_chunks
from ddptrain.files import write_result
from ddptrain.group import Group
from ddptrain.inspect_checkpoint import data_of, model_of, open_checkpoint


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to infer: which checkpoint, which samples, where to."""

    out: Path
    split: str = "test"
    run: int | None = None
    step: int | None = None


def infer(config: Config, group: Group, wanted: Wanted, timeout: float) -> str:
    """Write ``index,label,predicted,probability`` for every sample of the split; collective. Returns what was done.

    Args:
        timeout: seconds that ranks wait for what another reads or writes.
    Raises:
        UsageError, DataError, Mismatch, VolumeError: as for ``eval``; the output cannot be written.
    """
    manifest, content = _share_checkpoint(config, group, wanted, timeout)
    config = dataclasses.replace(config, **Config.identity_of(manifest))
    dataset = group.together("data", lambda: data_of(config, manifest["dataDigest"]), timeout)
    images, labels = (getattr(dataset, f"{wanted.split}_{part}") for part in ("images", "labels"))
    predicted, probability = answers(model_of(config, content, group.device, config.checkpoint_dir), images, group)
    text = _table(labels, predicted, probability)
    group.from_rank_zero("write", lambda: write_result(wanted.out, text.encode()), timeout)
    right = int((predicted == labels).sum())
    return f"{len(labels)} answers in {wanted.out}, {right} of them right ({right / len(labels):.2%})"


@torch.no_grad()
def answers(
    model: nn.Module, images: npt.NDArray[np.uint8], group: Group
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(class, its probability) of each image, in order of index, on every rank; collective."""
    told = torch.zeros(3, len(images), dtype=torch.float64)
    for first, end, logits in forward_chunks(model, images, group):
        probability, predicted = logits.double().softmax(1).max(1)
        told[0, first:end] += predicted.cpu()
        told[1, first:end] += probability.cpu()
        told[2, first:end] += 1
    # Each place is filled by one rank; the sum merges without moving a bit.
    told = group.sum(told.to(group.device)).cpu()
    assert_once(told[2])
    return told[0].to(torch.int64).numpy(), told[1].numpy()


def _share_checkpoint(config: Config, group: Group, wanted: Wanted, timeout: float) -> tuple[dict[str, Any], bytes]:
    content = b""

    def on_rank_zero() -> dict[str, Any]:
        nonlocal content
        saved, content = open_checkpoint(config, run=wanted.run, step=wanted.step)
        return {"manifest": saved.manifest, "size": len(content)}

    told = group.from_rank_zero("checkpoint", on_rank_zero, timeout)
    return told["manifest"], group.broadcast_bytes(content, told["size"])


def _table(
    labels: npt.NDArray[np.uint8], predicted: npt.NDArray[np.int64], probability: npt.NDArray[np.float64]
) -> str:
    text = io.StringIO()
    text.write("index,label,predicted,probability\n")
    for index, (label, guess, sure) in enumerate(zip(labels, predicted, probability, strict=True)):
        text.write(f"{index},{label},{guess},{sure:.6f}\n")
    return text.getvalue()
