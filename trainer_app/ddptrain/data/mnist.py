"""The data set: finds the IDX files, decompresses them, checks their digests, and returns uint8 arrays.

Used by every rank, by inference, and by the verb ``fetch``. Digests are of the decompressed
bytes because the published gzip files differ in their headers.
"""

import gzip
import hashlib
import importlib.util
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ddprun.errors import DataCorrupt, DataMissing, UsageError

Images = npt.NDArray[np.uint8]
SIDE = 28
_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049
# Limits of a file's content, for the node's memory: a few kilobytes of gzip can expand to gigabytes.
MNIST_BYTES, _MAX_BYTES = 2**26, 2**31


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its name without ``.gz``, and the SHA-256 of its decompressed content in MNIST."""

    part: str
    name: str
    sha256: str


# LeCun, Cortes, Burges: the MNIST database (CC BY-SA 3.0).
MNIST_FILES = tuple(
    IdxFile(part, name, sha256)
    for part, name, sha256 in (
        ("train_images", "train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train_labels", "train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("test_images", "t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("test_labels", "t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)


@dataclass(frozen=True)
class Dataset:
    """Images (N, 28, 28) uint8 and labels (N,) uint8; ``digest`` identifies the content of all four parts."""

    name: str
    train_images: Images
    train_labels: Images
    test_images: Images
    test_labels: Images
    digest: str


def load(kind: str, data_dir: str) -> Dataset:
    """Return the data set named by ``--data``.

    Raises:
        UsageError: no directory is given.
        DataError: files are absent, unreadable or malformed, or ``kind`` is ``mnist`` and their content is not MNIST's.
    """
    if kind == "digits":
        return _digits()
    if not data_dir:
        raise UsageError(
            f"--data {kind} needs --data-dir (or DDPJOB_DATA_DIR): the directory of the IDX files",
            hint="--data digits needs no files: it trains on scikit-learn's bundled digits",
            next_step="ddptrain fetch --data-dir ./data && ddptrain train --data-dir ./data",
        )
    parts, digests = {}, []
    for file in MNIST_FILES:
        content = read_content(Path(data_dir), file, limit=MNIST_BYTES if kind == "mnist" else _MAX_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if kind == "mnist" and digest != file.sha256:
            raise DataCorrupt(
                f"{file.name} in {data_dir} is not MNIST's: its content has SHA-256 {digest[:16]}…, "
                f"not {file.sha256[:16]}…",
                hint="the file is damaged, or belongs to another data set",
                next_step=f"ddptrain fetch --data-dir {data_dir} downloads MNIST; --data idx accepts other files",
            )
        parts[file.part] = _parse(content, file)
        digests.append(digest)
    for split in ("train", "test"):
        images, labels = parts[f"{split}_images"], parts[f"{split}_labels"]
        if len(images) != len(labels) or len(images) == 0:
            raise _malformed(f"{split} set in {data_dir} has {len(images)} images and {len(labels)} labels")
        if int(labels.max()) > 9:
            raise _malformed(f"{split} labels in {data_dir} go up to {int(labels.max())}; the classes are 0 to 9")
    return Dataset(kind, **parts, digest=hashlib.sha256("".join(digests).encode()).hexdigest())


def find(data_dir: Path, file: IdxFile) -> Path | None:
    """Return the file's path, raw or gzipped, under either of its two common names; None if absent."""
    for name in (file.name, file.name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            if (data_dir / (name + suffix)).is_file():
                return data_dir / (name + suffix)
    return None


def decompress(stream: BinaryIO, limit: int) -> bytes:
    """Return the content of a gzip stream.

    Raises:
        OSError, EOFError, zlib.error: it is damaged, or its content is larger than ``limit`` bytes.
    """
    with gzip.open(stream) as content:
        return _at_most(content, limit)


def _at_most(stream: BinaryIO | gzip.GzipFile, limit: int) -> bytes:
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"its content is larger than {limit:,} bytes")
    return content


def read_content(data_dir: Path, file: IdxFile, limit: int = MNIST_BYTES) -> bytes:
    """Return the decompressed content.

    Raises:
        DataError: the file is absent, unreadable, not a complete gzip stream, or larger than ``limit`` bytes.
    """
    path = find(data_dir, file)
    if path is None:
        if data_dir.is_dir():
            there = f"holds {sorted(p.name for p in data_dir.iterdir())[:6]}"
        else:
            there = "is not a directory" if data_dir.exists() else "does not exist"
        raise DataMissing(
            f"{file.name}[.gz] is not in {data_dir}, which {there}",
            hint="the data volume may not be mounted there",
            next_step=f"ddptrain fetch --data-dir {data_dir}",
        )
    try:
        with path.open("rb") as stream:
            return decompress(stream, limit) if path.suffix == ".gz" else _at_most(stream, limit)
    except (OSError, EOFError, zlib.error) as error:
        raise DataCorrupt(f"cannot read {path}: {error}", next_step=f"ddptrain fetch --data-dir {data_dir}") from error


def _parse(content: bytes, file: IdxFile) -> Images:
    """Return an IDX file as an array. It holds a big-endian magic number, a 4-byte size per dimension, then bytes."""
    is_images = file.part.endswith("images")
    magic, dims = (_IMAGES_MAGIC, 3) if is_images else (_LABELS_MAGIC, 1)
    header = 4 * (dims + 1)
    if len(content) < header or int.from_bytes(content[:4], "big") != magic:
        raise _malformed(f"{file.name} is not an IDX file of {'images' if is_images else 'labels'}: bad magic number")
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    if len(content) != header + math.prod(shape):
        raise _malformed(f"{file.name} has {len(content)} bytes, but its header gives the shape {shape}")
    if is_images and shape[1:] != (SIDE, SIDE):
        raise _malformed(f"{file.name} holds images of {shape[1]}×{shape[2]} pixels, not 28×28")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _malformed(message: str) -> DataCorrupt:
    return DataCorrupt(message, next_step="replace the file; `ddptrain fetch` downloads the files of MNIST")


def _digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten 8×8 digits in MNIST's shape: each pixel tripled, a border of two."""
    package = importlib.util.find_spec("sklearn")  # an import would take every rank more than a second
    if package is None or package.origin is None:
        raise DataMissing("--data digits needs scikit-learn", next_step="pip install scikit-learn")
    try:  # rows of 64 pixels from 0 to 16, and the label
        table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    except (OSError, ValueError) as error:
        raise DataCorrupt(
            f"scikit-learn's digits cannot be read: {error}", next_step="reinstall scikit-learn"
        ) from error
    images = np.kron(table[:, :64].reshape(-1, 8, 8), np.ones((3, 3))) * (255 / 16)
    images = np.pad(images.astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    labels = table[:, 64].astype(np.uint8)
    # The set is ordered by writer, so every fifth sample is a representative test set.
    test = np.arange(len(labels)) % 5 == 4
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    return Dataset("digits", images[~test], labels[~test], images[test], labels[test], digest)
