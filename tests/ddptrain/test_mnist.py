"""Reading the data set: files are identified by their content, not by their name or gzip header."""

from __future__ import annotations

import gzip
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

from ddprun.errors import DataCorrupt, DataError, UsageError
from ddptrain.data.mnist import MNIST_FILES, load, read_content
from tests.ddptrain.synthetic import file_of, put, write_idx


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read_gzipped_or_raw_with_one_digest(tmp_path: Path, zipped: bool) -> None:
    data = load("idx", str(write_idx(tmp_path / "a", zipped=zipped)))
    assert (data.train_images.shape, data.test_labels.shape) == ((300, 28, 28), (70,))
    assert data.digest == load("idx", str(write_idx(tmp_path / "b"))).digest
    assert data.digest != load("idx", str(write_idx(tmp_path / "c", seed=1))).digest


def test_other_idx_files_are_refused_as_mnist(idx: Path) -> None:
    with pytest.raises(DataError, match="is not MNIST's") as caught:
        load("mnist", str(idx))
    assert caught.value.code == 66


@pytest.mark.parametrize(
    ("part", "content", "reason"),
    [
        ("train_images", struct.pack(">4I", 2049, 1, 28, 28) + bytes(784), "bad magic number"),
        ("train_images", struct.pack(">4I", 2051, 2, 28, 28) + bytes(784), "its header gives the shape"),
        ("train_images", struct.pack(">4I", 2051, 2**31, 28, 28), "its header gives the shape"),
        ("train_images", struct.pack(">4I", 2051, 300, 14, 56) + bytes(300 * 784), "not 28×28"),
        ("train_images", b"\0\0", "bad magic number"),
        ("test_labels", struct.pack(">2I", 2049, 3) + bytes(3), "70 images and 3 labels"),
        ("test_labels", struct.pack(">2I", 2049, 70) + bytes([10] * 70), "go up to 10"),
    ],
)
def test_malformed_file_is_refused_with_its_name(
    idx: Path, tmp_path: Path, part: str, content: bytes, reason: str
) -> None:
    folder = shutil.copytree(idx, tmp_path / "data")
    put(folder, file_of(part), content)
    with pytest.raises(DataError, match=reason):
        load("idx", str(folder))


def test_truncated_gzip_file_is_refused(idx: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(idx, tmp_path / "data")
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot read"):
        load("idx", str(folder))


def test_error_for_an_absent_file_lists_the_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").touch()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\[.gz\] is not in .*lost\+found"):
        load("mnist", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a directory"):
        load("idx", str(tmp_path / "file"))
    with pytest.raises(DataError, match="does not exist"):
        load("mnist", str(tmp_path / "nowhere"))


def test_mnist_without_a_directory_is_refused_instead_of_using_the_digits() -> None:
    with pytest.raises(UsageError, match="needs --data-dir"):
        load("mnist", "")


def test_digits_are_read_without_importing_scikit_learn() -> None:
    code = "import sys; from ddptrain.data.mnist import load; load('digits', ''); print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
    images, labels = load_digits(return_X_y=True)
    data = load("digits", "")
    assert sorted(np.concatenate([data.train_labels, data.test_labels])) == sorted(labels)
    test = np.arange(len(labels)) % 5 == 4
    assert (data.test_images[:, 3:26:3, 3:26:3] == (images[test].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)).all()


def test_digits_have_the_shape_of_mnist_and_a_separate_test_set() -> None:
    data = load("digits", "")
    assert data.train_images.shape == (1438, 28, 28)
    assert data.test_images.shape == (359, 28, 28)
    assert data.train_images.max() == 255
    train = {image.tobytes() for image in data.train_images}
    assert not any(image.tobytes() in train for image in data.test_images)


def test_a_small_file_that_expands_to_gigabytes_is_refused_early(tmp_path: Path) -> None:
    with gzip.open(tmp_path / f"{MNIST_FILES[0].name}.gz", "wb", compresslevel=9) as stream:
        for _ in range(80):
            stream.write(bytes(2**20))
    with pytest.raises(DataCorrupt, match="larger than 67,108,864 bytes"):
        read_content(tmp_path, MNIST_FILES[0])
