"""The verb ``predict``: which digit a PNG image shows."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ddprun.errors import DataCorrupt, DataMissing
from ddprun.files import dumps_json
from ddptrain import weights
from ddptrain.config import Config
from ddptrain.data.mnist import SIDE
from ddptrain.inference.trained_model import Classifier, model_of, open_checkpoint

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
        raise DataMissing(f"cannot read {path}: Pillow is not installed", next_step="pip install pillow") from None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror}", next_step="give the path of a PNG image") from error
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.mode not in ("L", "LA", "RGB", "RGBA"):
                reason = f"images of the mode {image.mode} are not supported"
            elif image.width * image.height > MAX_PIXELS:
                reason = f"{image.width}×{image.height} pixels are too many"
            else:
                image.verify()  # the checksums, which decoding does not compare
                with Image.open(io.BytesIO(content), formats=["PNG"]) as verified:
                    pixels: Pixels = np.array(verified, np.uint8)
                return pixels.reshape(image.height, image.width, -1)
    except UnidentifiedImageError:  # its text is the repr of the buffer
        reason = "not a PNG image, or damaged at its beginning"
    except Exception as error:  # Pillow raises many types on damaged files
        reason = f"the PNG image is damaged: {error}"
    raise DataCorrupt(f"{path}: {reason}", next_step="save it as an 8-bit grey or RGB PNG image of at most 4096×4096")


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
