"""The ``predict`` verb: which digit a PNG image shows, by a saved model.

A photograph of paper is dark on light and of any size; MNIST's digits are light on dark, 20 pixels long, their centre
of mass in the middle of 28 × 28. ``as_mnist`` makes the one of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ddptrain import png, weights
from ddptrain.batches import normalise
from ddptrain.config import Config
from ddptrain.errors import DataError
from ddptrain.finite import dumps
from ddptrain.inspect_checkpoint import model_of, open_checkpoint
from ddptrain.mnist import SIDE

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
        raise DataError(f"{name} shows no digit: hardly anything differs from its border", next_step="draw one")
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
