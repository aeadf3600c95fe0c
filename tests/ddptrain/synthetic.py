"""Small data sets: seeded IDX files of ten noisy patterns, which a few steps can learn."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from ddptrain.data.mnist import MNIST_FILES, IdxFile


def write_idx(folder: Path, *, train: int = 300, test: int = 70, seed: int = 0, zipped: bool = True) -> Path:
    """Write the four files below ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    patterns = np.kron(random.integers(0, 256, (10, 7, 7)), np.ones((4, 4)))  # coarse, so that a shift changes little
    for split, count in (("train", train), ("test", test)):
        labels = random.integers(0, 10, count)
        noise = random.integers(0, 256, (count, 28, 28))
        images = (0.6 * patterns[labels] + 0.4 * noise).astype(np.uint8)
        contents = {
            f"{split}_images": struct.pack(">4I", 2051, count, 28, 28) + images.tobytes(),
            f"{split}_labels": struct.pack(">2I", 2049, count) + labels.astype(np.uint8).tobytes(),
        }
        for part, content in contents.items():
            put(folder, file_of(part), content, zipped=zipped)
    return folder


def file_of(part: str) -> IdxFile:
    """Return the entry of MNIST_FILES for a part such as ``train_images``."""
    return next(file for file in MNIST_FILES if file.part == part)


def put(folder: Path, file: IdxFile, content: bytes, *, zipped: bool = True) -> Path:
    """Write one file, gzipped or raw."""
    path = folder / (file.name + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(content, 1, mtime=0) if zipped else content)
    return path
