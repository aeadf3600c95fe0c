"""The verbs that use a trained model: ``eval``, ``infer``, ``predict`` and ``export``. They only read checkpoints.

``worker`` runs ``infer`` on every rank, as it runs a training; the other verbs run in one process.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ddptrain import weights
from ddptrain.checkpoint_files import Saved, read_newest
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.data.batches import normalise
from ddptrain.data.mnist import SIDE
from ddptrain.distributed.device import resolve_device
from ddptrain.distributed.process_group import Group
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import DataCorrupt, DataMismatch, DataMissing, TrainerError
from ddptrain.files import dumps_json, write_result
from ddptrain.heartbeat import Heartbeat
from ddptrain.resources import threads_per_rank
from ddptrain.signals import StopFlag
from ddptrain.training import models
from ddptrain.training.evaluate import ResidentSet, assert_once, evaluate, forward_chunks, resident


def open_checkpoint(config: Config, *, run: int | None = None, step: int | None = None) -> tuple[Config, Saved, bytes]:
    """Return the newest valid checkpoint (or that of ``run``, ``step``) as (its config, what it is, its content).

    Raises:
        UsageError: no directory given. DataMissing: no valid checkpoint in it.
        ConfigMismatch: a newer version of ddptrain trained it.
    """
    saved, content = read_newest(config.checkpoint_root(), run=run, step=step)
    return as_trained(config, saved.manifest), saved, content


def as_trained(config: Config, manifest: Mapping[str, Any]) -> Config:
    """Return the config with the settings that the manifest records."""
    return config.replaced(Config.identity_of(manifest))


def data_of(config: Config, digest: str) -> mnist.Dataset:
    """Return the data set, if it is the one that the checkpoint was trained on.

    Raises:
        DataMismatch: it is another one. DataError: it is absent or damaged.
    """
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != digest:
        raise DataMismatch(
            f"the data in {config.data_dir or config.data} differ from those the checkpoint was trained on",
            next_step="give the --data-dir of the training",
        )
    return dataset


def model_of(config: Config, content: bytes, device: torch.device, origin: str) -> nn.Module:
    """Return the configured model with the weights in ``content``, read from ``origin``."""
    model = models.build(config, device)
    weights.load(model, weights.parse(content, device), origin)
    return model.eval()


class Classifier(nn.Module):
    """Maps ``pixels`` (N, 28, 28) uint8, light digits on dark, to logits (N, 10)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the ten logits of each image."""
        logits: torch.Tensor = self.model(normalise(pixels, self.dtype).unsqueeze(1))
        return logits


def alone(device: torch.device) -> Group:
    """Return a group of this process only."""
    return Group(Ranks(local_rank=0), device, None, StopFlag(), Heartbeat())


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print the accuracy of a checkpoint on the test set as one line of JSON. Returns 0.

    Raises:
        UsageError, DataError, Mismatch: as ``open_checkpoint`` and ``data_of``.
    """
    config, saved, content = open_checkpoint(config, run=run, step=step)
    device = resolve_device(config, Ranks(local_rank=0))
    torch.set_num_threads(config.threads or threads_per_rank(1))
    dataset = data_of(config, saved.manifest["dataDigest"])
    model = model_of(config, content, device, config.checkpoint_dir)
    result = evaluate(model, ResidentSet.on(device, dataset.test_images, dataset.test_labels), alone(device))
    found = {
        "accuracy": round(result.accuracy, 8), "loss": result.loss, "correct": result.correct,
        "samples": result.samples, "checkpoint": saved.place, "data": config.data,
    }  # fmt: skip
    print(dumps_json(found))
    return 0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to infer: which checkpoint, which samples, where to."""

    out: Path
    split: str = "test"
    run: int | None = None
    step: int | None = None


def infer(config: Config, group: Group, wanted: Wanted, timeout: float) -> str:
    """Write ``index,label,predicted,probability`` for every sample of the split; collective. Returns a summary.

    Only rank 0 reads the checkpoint and writes the file, which is the same for any number of ranks.

    Args:
        timeout: seconds that ranks wait for another rank to read or write.
    Raises:
        UsageError, DataError, Mismatch, VolumeError: as for ``eval``; the output cannot be written.
    """
    manifest, content = _share_checkpoint(config, group, wanted, timeout)
    config = as_trained(config, manifest)
    dataset = group.run_on_all_ranks("data", lambda: data_of(config, manifest["dataDigest"]), timeout)
    images, labels = (getattr(dataset, f"{wanted.split}_{part}") for part in ("images", "labels"))
    predicted, probability = predictions(model_of(config, content, group.device, config.checkpoint_dir), images, group)
    text = _table(labels, predicted, probability)
    group.run_on_rank_zero("write", lambda: write_result(wanted.out, text.encode()), timeout)
    correct = int((predicted == labels).sum())
    return f"wrote {len(labels)} predictions to {wanted.out}, {correct} of them correct ({correct / len(labels):.2%})"


@torch.no_grad()
def predictions(
    model: nn.Module, images: npt.NDArray[np.uint8], group: Group
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return (class, its probability) of each image, in order of index, on every rank; collective."""
    rows = torch.zeros(3, len(images), dtype=torch.float64)
    for first, end, logits in forward_chunks(model, resident(images, group.device), group):
        probability, predicted = logits.double().softmax(1).max(1)
        rows[0, first:end] += predicted.cpu()
        rows[1, first:end] += probability.cpu()
        rows[2, first:end] += 1
    # One rank fills each column and the others add 0, so the sum is exact.
    rows = group.sum(rows.to(group.device)).cpu()
    assert_once(rows[2])
    return rows[0].to(torch.int64).numpy(), rows[1].numpy()


def _share_checkpoint(config: Config, group: Group, wanted: Wanted, timeout: float) -> tuple[dict[str, Any], bytes]:
    content = b""

    def on_rank_zero() -> dict[str, Any]:
        nonlocal content
        _, saved, content = open_checkpoint(config, run=wanted.run, step=wanted.step)
        return {"manifest": saved.manifest, "size": len(content)}

    shared = group.run_on_rank_zero("checkpoint", on_rank_zero, timeout)
    return shared["manifest"], group.broadcast_bytes(content, shared["size"])


def _table(
    labels: npt.NDArray[np.uint8], predicted: npt.NDArray[np.int64], probability: npt.NDArray[np.float64]
) -> str:
    rows = enumerate(zip(labels, predicted, probability, strict=True))
    lines = [f"{index},{label},{digit},{certainty:.6f}\n" for index, (label, digit, certainty) in rows]
    return "index,label,predicted,probability\n" + "".join(lines)


MAX_PIXELS = 4096 * 4096  # a few kilobytes of PNG can inflate to gigabytes
_DIGIT = 20  # pixels of the longer side, as in MNIST
_MIN_CONTRAST = 32  # of 255; an image with less is blank
Pixels = npt.NDArray[np.uint8]
Grey = npt.NDArray[np.float64]


@torch.no_grad()
def predict(config: Config, images: Sequence[str], *, weights_file: str = "", as_json: bool = False) -> int:
    """Print the digit in each image and the model's certainty. Returns 0.

    Args:
        weights_file: an exported state_dict or a checkpoint, instead of the newest in ``config.checkpoint_dir``.
    Raises:
        UsageError, DataError, Mismatch: no weights, an image that cannot be read, weights of another model.
    """
    digits = [as_mnist(read_png(Path(name)), name) for name in images]  # before the weights: it fails faster
    if weights_file:
        content, origin = weights.read(Path(weights_file)), weights_file
    else:
        config, _, content = open_checkpoint(config)
        origin = config.checkpoint_dir
    torch.set_num_threads(config.threads or 1)
    model = model_of(config, content, torch.device("cpu"), origin)
    probabilities = Classifier(model)(torch.from_numpy(np.stack(digits))).double().softmax(1)
    for name, row in zip(images, probabilities, strict=True):
        best, second = (int(digit) for digit in row.argsort(descending=True)[:2])
        if as_json:
            print(dumps_json({"image": name, "digit": best, "probabilities": [round(p, 6) for p in row.tolist()]}))
        else:
            print(f"{name}: {best}  ({row[best]:.1%}; next {second}, {row[second]:.1%})")
    return 0


def read_png(path: Path) -> Pixels:
    """Return the image as (height, width, channels); the channels are grey, grey + alpha, RGB or RGB + alpha.

    Raises:
        DataMissing: it cannot be read. DataCorrupt: it is damaged or of another kind.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataMissing(
            f"cannot read {path}: Pillow is not installed", next_step="pip install 'ddpjob[trainer]'"
        ) from None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror}", next_step="give the path of a PNG image") from error
    reason = _unsupported(content)
    if not reason:
        try:
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                image.verify()  # the checksums, which decoding does not compare
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                pixels: Pixels = np.array(image, np.uint8)
                return pixels.reshape(image.height, image.width, -1)
        except UnidentifiedImageError:  # its text is the repr of the buffer
            reason = "the PNG image is damaged: its first chunks cannot be read"
        except Exception as error:  # Pillow raises many types on damaged files
            reason = f"the PNG image is damaged: {error}"
    raise DataCorrupt(
        f"{path}: {reason}",
        next_step="save it as an 8-bit grey or RGB PNG image, not interlaced, of at most 4096×4096",
    )


def _unsupported(content: bytes) -> str:
    """Return why the format is not accepted, from the PNG header; empty if it is."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or len(content) < 29:
        return "not a PNG image"
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    depth, colour_type, interlaced = content[24], content[25], content[28]
    if colour_type == 3:
        return "images with a palette are not supported"
    if depth != 8:
        return f"images with {depth} bits per channel are not supported, only with 8"
    if interlaced:
        return "interlaced images are not supported"
    if width * height > MAX_PIXELS:
        return f"{width}×{height} pixels are too many"
    return ""


def as_mnist(pixels: Pixels, name: str) -> Pixels:
    """Return a (28, 28) image, light on dark, scaled and centred as in MNIST; one of that kind is unchanged.

    MNIST's digits are 20 pixels long, with their centre of mass in the middle of 28×28.

    Raises:
        DataCorrupt: the image is blank.
    """
    grey = _grey(pixels)
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    paper = float(np.median(border))
    is_light = paper > 127
    ink = np.clip(paper - grey if is_light else grey - paper, 0, None)
    if ink.max() < _MIN_CONTRAST:
        raise DataCorrupt(
            f"{name} shows no digit: hardly any pixel differs from its border",
            next_step="give an image of one digit, dark on light or light on dark",
        )
    if not is_light and grey.shape == (SIDE, SIDE):
        return grey.round().astype(np.uint8)
    ink *= 255 / ink.max()
    rows, columns = (np.flatnonzero((ink > _MIN_CONTRAST).any(axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = _DIGIT / max(cut.shape)
    height, width = (max(1, round(side * scale)) for side in cut.shape)
    return _centred(_shares(height, cut.shape[0]) @ cut @ _shares(width, cut.shape[1]).T)


def _grey(pixels: Pixels) -> Grey:
    """Return the luminance (ITU-R BT.601) on white paper."""
    values = pixels.astype(np.float64)
    channels = values.shape[2]
    light = values[..., 0] if channels < 3 else values[..., :3] @ np.array([0.299, 0.587, 0.114])
    if channels in (2, 4):
        alpha = values[..., -1] / 255
        light = light * alpha + 255 * (1 - alpha)
    return np.asarray(light, np.float64)


def _shares(new: int, old: int) -> Grey:
    """Return how much of each old pixel (column) lies in each new pixel (row); each row sums to 1.

    Pillow's box filter would round these shares to whole pixels.
    """
    edges = np.linspace(0, old, new + 1)
    starts, ends = edges[:-1, None], edges[1:, None]
    cells = np.arange(old)[None]
    overlap = np.clip(np.minimum(ends, cells + 1) - np.maximum(starts, cells), 0, None)
    return np.asarray(overlap / overlap.sum(1, keepdims=True), np.float64)


def _centred(digit: Grey) -> Pixels:
    """Return the digit on 28×28 pixels with its centre of mass in the middle, as far as it fits."""
    height, width = digit.shape
    mass = digit.sum()
    row = float((digit.sum(1) @ np.arange(height)) / mass)
    column = float((digit.sum(0) @ np.arange(width)) / mass)
    top = int(np.clip(round((SIDE - 1) / 2 - row), 0, SIDE - height))
    left = int(np.clip(round((SIDE - 1) / 2 - column), 0, SIDE - width))
    sheet = np.zeros((SIDE, SIDE), np.uint8)
    sheet[top : top + height, left : left + width] = np.clip(digit.round(), 0, 255)
    return sheet


@torch.no_grad()
def export(config: Config, out: Path, kind: str, *, run: int | None, step: int | None) -> int:
    """Write the model of a checkpoint to ``out``, as a state_dict or as a program of ``torch.export``. Returns 0.

    The program takes raw pixels, normalises them itself, and needs neither this package nor its model definitions.

    Raises:
        UsageError, DataError: no checkpoint. VolumeError: ``out`` cannot be written.
    """
    config, saved, content = open_checkpoint(config, run=run, step=step)
    model = model_of(config, content, torch.device("cpu"), config.checkpoint_dir)
    buffer = io.BytesIO()
    if kind == "state-dict":
        torch.save({name: value.contiguous() for name, value in model.state_dict().items()}, buffer)
    else:
        classifier = Classifier(model)
        example = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)  # a batch of one would become a constant
        shapes = {"pixels": {0: torch.export.Dim("batch", min=1)}}
        program = torch.export.export(classifier, (example,), dynamic_shapes=shapes)
        with warnings.catch_warnings():
            # PyTorch warns about weights in channels_last, which are not contiguous. _check compares the results.
            warnings.filterwarnings("ignore", message="No complete tensor found")
            torch.export.save(program, buffer)
        _check(buffer, classifier)
    write_result(out, buffer.getvalue())
    print(f"wrote the {kind} of run {saved.run}, step {saved.step} to {out} ({len(buffer.getvalue()):,} bytes)")
    return 0


def _check(buffer: io.BytesIO, classifier: Classifier) -> None:
    """Read the program back and compare its logits with the model's, for one image and for several."""
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        ours, theirs = classifier(pixels), program(pixels)
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            worst = float((ours - theirs).abs().max())
            raise TrainerError(
                f"the logits of the exported program differ from the model's by {worst:g}",
                next_step="use --format state-dict, and report this with your version of torch",
            )
