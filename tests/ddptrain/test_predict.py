"""``predict``: PNG images are read, converted to MNIST's format and classified; other files are refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddprun.errors import DataCorrupt
from ddptrain.data import mnist
from ddptrain.inference.predict import Pixels, as_mnist, read_png
from tests.ddptrain.runs import ForkServer


def png(pixels: Pixels, mode: str | None = None) -> bytes:
    """Return the PNG of (height, width, channels) pixels; of another mode than the channels say, if one is given."""
    image, content = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels), io.BytesIO()
    (image.convert(mode) if mode else image).save(content, "PNG")
    return content.getvalue()


def read(content: bytes, folder: Path) -> Pixels:
    (folder / "digit.png").write_bytes(content)
    return read_png(folder / "digit.png")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pixels_of_any_number_of_channels_are_read_as_written(tmp_path: Path, channels: int) -> None:
    pixels = np.arange(24 * channels, dtype=np.uint8).reshape(4, 6, channels)
    assert (read(png(pixels), tmp_path) == pixels).all()


SMALL = np.arange(48, dtype=np.uint8).reshape(6, 8, 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a PNG image"),
        (b"GIF89a", "not a PNG image"),
        (png(SMALL, "P"), "mode P "),
        (png(SMALL, "I;16"), "mode I"),
        (png(SMALL, "1"), "mode 1 "),
        (png(np.zeros((4096, 4097, 1), np.uint8)), "4097×4096"),
        (png(SMALL)[:-30], "damaged"),
        (png(SMALL).replace(b"IDAT", b"IDAX"), "damaged"),
    ],
    ids=["empty", "gif", "palette", "16 bits", "1 bit", "large", "truncated", "no data"],
)
def test_an_unsupported_image_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(DataCorrupt, match=reason) as caught:
        read(content, tmp_path)
    assert "digit.png" in str(caught.value)
    assert " object at 0x" not in str(caught.value)
    assert caught.value.next_step


def seven(height: int = 200, width: int = 300, *, ink: int = 0, paper: int = 255) -> Pixels:
    """Return an image with a 7 that is not in its centre."""
    sheet = np.full((height, width, 1), paper, np.uint8)
    sheet[20:36, 150:230] = ink
    for step in range(90):
        sheet[36 + step, 214 - step // 2 : 230 - step // 2] = ink
    return sheet


@pytest.mark.parametrize("ink", ["dark on light", "light on dark", "dark on transparent"])
def test_a_drawing_is_centred_inverted_and_scaled_to_20_pixels(ink: str) -> None:
    drawn = seven() if ink.startswith("dark") else seven(ink=255, paper=0)
    if ink.endswith("transparent"):
        drawn = np.concatenate([np.zeros_like(drawn)] * 3 + [255 - drawn], axis=2)
    image = as_mnist(drawn, "7.png")
    assert (image.shape, image.dtype) == ((28, 28), np.uint8)
    rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
    assert max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 == 20
    assert image.max() >= 250
    weight = image.astype(float)
    centre = (weight.sum(1) @ np.arange(28) / weight.sum(), weight.sum(0) @ np.arange(28) / weight.sum())
    assert all(abs(place - 13.5) <= 0.75 for place in centre)


def test_an_image_in_mnists_format_is_unchanged() -> None:
    image = mnist.load("digits", "").test_images[3]
    assert (as_mnist(image[..., None], "x.png") == image).all()


@pytest.mark.parametrize("level", [0, 128, 255])
@pytest.mark.parametrize("size", [(50, 40), (28, 28)])
def test_a_blank_image_is_refused(level: int, size: tuple[int, int]) -> None:
    with pytest.raises(DataCorrupt, match=r"blank\.png shows no digit"):
        as_mnist(np.full((*size, 1), level, np.uint8), "blank.png")


def test_a_trained_model_recognizes_the_digits(ddptrain: ForkServer, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    ddptrain.run("train", "--data", "digits", "--epochs", 4, "--checkpoint-dir", checkpoints)
    dataset = mnist.load("digits", "")
    names = []
    for index in range(40):
        names.append(tmp_path / f"{index}.png")
        names[-1].write_bytes(png(dataset.test_images[index][..., None]))
    answers = ddptrain.run("predict", *names, "--checkpoint-dir", checkpoints, "--json").output().splitlines()
    rows = [json.loads(line) for line in answers]
    assert [Path(answer["image"]) for answer in rows] == names
    assert all(abs(sum(answer["probabilities"]) - 1) < 1e-4 for answer in rows)
    right = [answer["digit"] == label for answer, label in zip(rows, dataset.test_labels, strict=False)]
    assert sum(right) >= 36

    ddptrain.run("export", "--checkpoint-dir", checkpoints, "--out", tmp_path / "weights.pt")
    by_weights = ddptrain.run("predict", names[0], "--weights", tmp_path / "weights.pt").output()
    assert by_weights.startswith(f"{names[0]}: {rows[0]['digit']}  (")


def test_predict_names_a_missing_image_or_model(ddptrain: ForkServer, tmp_path: Path) -> None:
    absent = ddptrain.run("predict", tmp_path / "absent.png", "--checkpoint-dir", tmp_path, code=66)
    assert "cannot read" in absent.output()
    (tmp_path / "digit.png").write_bytes(png(seven()))
    unnamed = ddptrain.run("predict", tmp_path / "digit.png", code=2)
    assert "--checkpoint-dir" in unnamed.output()
