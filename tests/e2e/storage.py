"""Put MNIST's files on the volumes of trainings, in the folder that the example's ``--data-dir`` names.

A volume is a folder of this machine, so tests read checkpoints and metrics as plain files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.kind.cluster_config import mnist_dir

MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def has_mnist() -> bool:
    """Return whether this machine has the files, in ``$DDPJOB_MNIST_DIR`` or in ../shared/mnist."""
    folder = mnist_dir()
    return folder is not None and all((folder / name).is_file() for name in MNIST_FILES)


def put_mnist(volume: Path) -> None:
    """Copy missing files to ``volume``/data."""
    folder = volume / "data"
    folder.mkdir(parents=True, exist_ok=True)
    source = mnist_dir()
    for name in MNIST_FILES:
        if source is not None and not (folder / name).is_file():
            shutil.copyfile(source / name, folder / name)
