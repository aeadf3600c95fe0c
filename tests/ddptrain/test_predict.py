"""``predict``: PNG images are read, converted to MNIST's format and classified; other files are refused."""

from __future__ import annotations

import json
import resource
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ddprun.errors import DataCorrupt
from ddptrain.data import mnist
from ddptrain.inference.predict import Pixels, as_mnist, read_png
from tests.ddptrain.pngs import SIGNATURE, chunk, encode, header
from tests.ddptrain.runs import ForkServer


@st.composite
def images(draw: st.DrawFn) -> tuple[Pixels, list[int]]:
    height, width, channels = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pixels = draw(arrays(np.uint8, (height, width, channels)))
    return pixels, draw(st.lists(st.integers(0, 4), min_size=height, max_size=height))


def read(content: bytes, folder: Path) -> Pixels:
    (folder / "digit.png").write_bytes(content)
    return read_png(folder / "digit.png")


@given(images())
@settings(deadline=None)
def test_every_channel_count_and_filter_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, image: tuple[Pixels, list[int]]
) -> None:
    pixels, filters = image
    assert (read(encode(pixels, filters), tmp_path_factory.getbasetemp()) == pixels).all()


@given(st.binary(max_size=300), st.integers(0, 10**6), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_damaged_image_is_refused_or_read_correctly(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int, prefixed: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    whole = encode(pixels, [4, 3, 2, 1])
    flipped = bytearray(whole)
    flipped[place % len(whole)] ^= 1 + place % 255
    for content in (SIGNATURE + noise if prefixed else noise, bytes(flipped), whole[: place % len(whole)]):
        try:
            found = read(content, folder)
        except DataCorrupt:
            continue
        assert (found == pixels).all(), "a change that is not noticed must not change a pixel"


def image_data(size: int) -> bytes:
    return chunk(b"IDAT", zlib.compress(bytes(size))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a PNG image"),
        (b"GIF89a", "not a PNG image"),
        (SIGNATURE + header(2, 2, colour=3) + image_data(6), "mode P "),
        (SIGNATURE + header(2, 2, depth=16) + image_data(10), "mode I"),
        (SIGNATURE + header(2, 2, depth=1) + image_data(4), "mode 1 "),
        (SIGNATURE + header(60_000, 60_000) + image_data(6), "3600000000 pixels"),
        (SIGNATURE + header(4097, 4096) + image_data(6), "4097×4096"),
        (SIGNATURE + header(0, 2) + image_data(6), "damaged"),
        (SIGNATURE + header(2, 2) + image_data(5), "damaged: image file is truncated"),
        (SIGNATURE + header(2, 2), "damaged"),
        (SIGNATURE + header(2, 2) + image_data(6)[:-15], "damaged"),
        (SIGNATURE + header(2, 1) + chunk(b"IDAT", zlib.compress(bytes([9, 0, 0]))) + chunk(b"IEND", b""), "damaged"),
    ],
)  # fmt: skip
def test_an_unsupported_image_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(DataCorrupt, match=reason) as caught:
        read(content, tmp_path)
    assert "digit.png" in str(caught.value)
    assert " object at 0x" not in str(caught.value)
    assert caught.value.next_step


def test_pixel_data_beyond_the_size_in_the_header_are_not_inflated(tmp_path: Path) -> None:
    packer, zeros = zlib.compressobj(), bytes(2**20)
    packed = b"".join([*(packer.compress(zeros) for _ in range(300)), packer.flush()])
    bomb = SIGNATURE + header(2, 2) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (read(bomb, tmp_path) == 0).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"


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
        names[-1].write_bytes(encode(dataset.test_images[index][..., None]))
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
    (tmp_path / "digit.png").write_bytes(encode(seven()))
    unnamed = ddptrain.run("predict", tmp_path / "digit.png", code=2)
    assert "--checkpoint-dir" in unnamed.output()
