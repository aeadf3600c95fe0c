"""Saved models opened again: for the ``eval`` verb here, and for ``infer``, ``predict`` and ``export``.

All of them only read the checkpoint directory, so a read-only mount will do.

The ``infer`` verb: a saved model's answer for every sample, computed by one rank or many, written in index order.

Alone, or one process per rank under torchrun; ``worker`` calls it as it does a training. Each rank judges whole chunks,
as in ``evaluate``; rank 0, which alone needs to see the checkpoint, merges and writes. The file is the same, byte for
byte, whatever the number of ranks.

The ``predict`` verb: which digit a PNG image shows, by a saved model.

A photograph of paper is dark on light and of any size; MNIST's digits are light on dark, 20 pixels long, their centre
of mass in the middle of 28 × 28. ``as_mnist`` makes the one of the other.

The ``export`` verb: a trained model for other programs, as a bare state_dict or as a program of ``torch.export``.

The program takes raw pixels, normalises them itself, and needs neither this package nor its model definitions. What was
written is read back and must answer as the model does.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ddptrain import png, weights
from ddptrain.checkpoint import Saved, newest_valid, reading
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.data.batches import normalise
from ddptrain.data.mnist import SIDE
from ddptrain.distributed.device import resolve_device
from ddptrain.distributed.process_group import Group
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import DataCorrupt, DataMismatch, DataMissing, TrainerError, UsageError
from ddptrain.files import dumps, write_result
from ddptrain.heartbeat import Heartbeat
from ddptrain.resources import threads_per_rank
from ddptrain.signals import StopFlag
from ddptrain.training import models
from ddptrain.training.evaluate import assert_once, evaluate, forward_chunks


def open_checkpoint(config: Config, *, run: int | None, step: int | None) -> tuple[Saved, bytes]:
    """The newest valid checkpoint below ``config.checkpoint_dir`` (or that of ``run``, ``step``) and its content.

    Raises:
        UsageError: no directory given. DataError: no valid checkpoint in it.
    """
    if not config.checkpoint_dir:
        raise UsageError("no --checkpoint-dir (or DDPJOB_CHECKPOINT_DIR) to read", next_step="name the directory")
    root = Path(config.checkpoint_dir)
    with reading(root):
        found = newest_valid(
            root, lambda path, reason: print(f"warning: {path}: {reason}", file=sys.stderr), run=run, step=step
        )
    if found is None:
        which = "".join(f" of {name} {n}" for name, n in (("run", run), ("step", step)) if n is not None)
        raise DataMissing(
            f"no valid checkpoint{which} in {config.checkpoint_dir}",
            hint="runs are folders run-000001, run-000002 … in there",
            next_step=f"`ddptrain ckpt verify --checkpoint-dir {config.checkpoint_dir}` says which there are"
            if which
            else "check the mount",
        )
    return found


def data_of(config: Config, digest: str) -> mnist.Dataset:
    """The data set that the checkpoint was trained on.

    Raises:
        Mismatch: the directory holds another one. DataError: it is absent.
    """
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != digest:
        raise DataMismatch(
            f"the checkpoint was trained on other data than {config.data_dir or config.data} holds",
            next_step="give the --data-dir it was trained with",
        )
    return dataset


def model_of(config: Config, content: bytes, device: torch.device, origin: str) -> nn.Module:
    """The configured model with the weights in ``content``."""
    model = models.build(config, device)
    weights.load(model, weights.parse(content, device), origin)
    return model.eval()


def alone(device: torch.device) -> Group:
    """A group of this process only."""
    return Group(Ranks(local_rank=0), device, None, StopFlag(), Heartbeat())


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print one line of JSON with the accuracy of the newest valid checkpoint (or of ``run``, ``step``). Returns 0.

    Raises:
        UsageError, DataError, Mismatch: as ``open_checkpoint`` and ``data_of``.
    """
    saved, content = open_checkpoint(config, run=run, step=step)
    config = dataclasses.replace(config, **Config.identity_of(saved.manifest))
    device = resolve_device(config, Ranks(local_rank=0))
    torch.set_num_threads(config.threads or threads_per_rank(1))
    dataset = data_of(config, saved.manifest["dataDigest"])
    model = model_of(config, content, device, config.checkpoint_dir)
    result = evaluate(model, dataset.test_images, dataset.test_labels, alone(device))
    print(
        dumps(
            {
                "accuracy": round(result.accuracy, 8),
                "loss": result.loss,
                "correct": result.correct,
                "samples": result.samples,
                "checkpoint": saved.place,
                "data": config.data,
            }
        )
    )
    return 0


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
    dataset = group.run_on_all_ranks("data", lambda: data_of(config, manifest["dataDigest"]), timeout)
    images, labels = (getattr(dataset, f"{wanted.split}_{part}") for part in ("images", "labels"))
    predicted, probability = answers(model_of(config, content, group.device, config.checkpoint_dir), images, group)
    text = _table(labels, predicted, probability)
    group.run_on_rank_zero("write", lambda: write_result(wanted.out, text.encode()), timeout)
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

    told = group.run_on_rank_zero("checkpoint", on_rank_zero, timeout)
    return told["manifest"], group.broadcast_bytes(content, told["size"])


def _table(
    labels: npt.NDArray[np.uint8], predicted: npt.NDArray[np.int64], probability: npt.NDArray[np.float64]
) -> str:
    text = io.StringIO()
    text.write("index,label,predicted,probability\n")
    for index, (label, guess, sure) in enumerate(zip(labels, predicted, probability, strict=True)):
        text.write(f"{index},{label},{guess},{sure:.6f}\n")
    return text.getvalue()


_DIGIT = 20  # pixels of the longer side, as in MNIST
_LEAST_CONTRAST = 32  # of 255; less is an empty sheet
Grey = npt.NDArray[np.float64]


@torch.no_grad()
def predict(config: Config, images: Sequence[str], *, weights_file: str = "", as_json: bool = False) -> int:
    """Print the digit of each image and how sure the model is. Returns 0.

    Args:
        weights_file: an exported state_dict or a checkpoint, instead of the newest in ``config.checkpoint_dir``.
    Raises:
        UsageError, DataError, Mismatch: no weights, an image that cannot be read, weights of another model.
    """
    digits = [as_mnist(png.read(Path(name)), name) for name in images]  # first: a wrong name is known at once
    if weights_file:
        content, origin = weights.read(Path(weights_file)), weights_file
    else:
        saved, content = open_checkpoint(config, run=None, step=None)
        config, origin = dataclasses.replace(config, **Config.identity_of(saved.manifest)), config.checkpoint_dir
    torch.set_num_threads(config.threads or 1)
    model = model_of(config, content, torch.device("cpu"), origin)
    pixels = torch.from_numpy(np.stack(digits))
    chances = model(normalise(pixels, next(model.parameters()).dtype).unsqueeze(1)).double().softmax(1)
    for name, row in zip(images, chances, strict=True):
        best = int(row.argmax())
        if as_json:
            print(dumps({"image": name, "digit": best, "probabilities": [round(p, 6) for p in row.tolist()]}))
        else:
            second = int(row.argsort()[-2])
            print(f"{name}: {best}  ({row[best]:.1%}; next {second}, {row[second]:.1%})")
    return 0


def as_mnist(pixels: png.Pixels, name: str) -> npt.NDArray[np.uint8]:
    """A (28, 28) uint8 image, light on dark, scaled and centred as MNIST's are; one that is so already, as it is.

    Raises:
        DataError: nothing is drawn on it.
    """
    grey = _grey(pixels)
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    paper = float(np.median(border))
    is_light = paper > 127
    ink = np.clip(paper - grey if is_light else grey - paper, 0, None)
    if ink.max() < _LEAST_CONTRAST:
        raise DataCorrupt(f"{name} shows no digit: hardly anything differs from its border", next_step="draw one")
    if not is_light and grey.shape == (SIDE, SIDE):
        return grey.round().astype(np.uint8)
    ink *= 255 / ink.max()
    rows, columns = (np.flatnonzero((ink > _LEAST_CONTRAST).any(axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = _DIGIT / max(cut.shape)
    small = _resized(cut, max(1, round(cut.shape[0] * scale)), max(1, round(cut.shape[1] * scale)))
    return _centred(small)


def _grey(pixels: png.Pixels) -> Grey:
    """Luminance (ITU-R BT.601), transparency shown as white paper."""
    values = pixels.astype(np.float64)
    channels = values.shape[2]
    light = values[..., 0] if channels < 3 else values[..., :3] @ np.array([0.299, 0.587, 0.114])
    if channels in (2, 4):
        cover = values[..., -1] / 255
        light = light * cover + 255 * (1 - cover)
    return np.asarray(light, np.float64)


def _resized(image: Grey, height: int, width: int) -> Grey:
    """Mean over the area that each new pixel covers."""
    return _shares(height, image.shape[0]) @ image @ _shares(width, image.shape[1]).T


def _shares(new: int, old: int) -> Grey:
    """Row i: how much of each old pixel lies under new pixel i; each row sums to 1."""
    edges = np.linspace(0, old, new + 1)
    starts, ends = edges[:-1, None], edges[1:, None]
    cells = np.arange(old)[None]
    overlap = np.clip(np.minimum(ends, cells + 1) - np.maximum(starts, cells), 0, None)
    return np.asarray(overlap / overlap.sum(1, keepdims=True), np.float64)


def _centred(digit: Grey) -> npt.NDArray[np.uint8]:
    """On 28 × 28, its centre of mass in the middle, as far as it fits."""
    height, width = digit.shape
    mass = digit.sum()
    down = float((digit.sum(1) @ np.arange(height)) / mass)
    right = float((digit.sum(0) @ np.arange(width)) / mass)
    top = int(np.clip(round((SIDE - 1) / 2 - down), 0, SIDE - height))
    left = int(np.clip(round((SIDE - 1) / 2 - right), 0, SIDE - width))
    sheet = np.zeros((SIDE, SIDE), np.uint8)
    sheet[top : top + height, left : left + width] = np.clip(digit.round(), 0, 255)
    return sheet


class Classifier(nn.Module):
    """``pixels`` (N, 28, 28) uint8, light digits on dark, to logits (N, 10)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The ten logits of each image."""
        logits: torch.Tensor = self.model(normalise(pixels, self.dtype).unsqueeze(1))
        return logits


@torch.no_grad()
def export(config: Config, out: Path, kind: str, *, run: int | None, step: int | None) -> int:
    """Write the newest valid checkpoint's model (or that of ``run``, ``step``) to ``out``. Returns 0.

    Raises:
        UsageError, DataError: no checkpoint. VolumeError: ``out`` cannot be written.
    """
    saved, content = open_checkpoint(config, run=run, step=step)
    config = dataclasses.replace(config, **Config.identity_of(saved.manifest))
    model = model_of(config, content, torch.device("cpu"), config.checkpoint_dir)
    buffer = io.BytesIO()
    if kind == "state-dict":
        torch.save({name: value.contiguous() for name, value in model.state_dict().items()}, buffer)
    else:
        torch.export.save(program_of(Classifier(model)), buffer)
        _check(buffer, Classifier(model))
    write_result(out, buffer.getvalue())
    print(f"{kind} of run {saved.run}, step {saved.step} in {out} ({len(buffer.getvalue()):,} bytes)")
    return 0


def program_of(classifier: Classifier) -> torch.export.ExportedProgram:
    """The classifier as an exported program for any number of images."""
    example = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)  # two: one would be taken for a constant
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(classifier, (example,), dynamic_shapes={"pixels": {0: batch}})


def _check(buffer: io.BytesIO, classifier: Classifier) -> None:
    """Read the program back and compare its answers for one image and for several."""
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        ours, theirs = classifier(pixels), program(pixels)
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            worst = float((ours - theirs).abs().max())
            raise TrainerError(f"the exported program differs from the model by {worst:g} on {count} image(s)")
