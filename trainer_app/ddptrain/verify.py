"""``data verify``: what is in a data directory, as a table."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ddptrain.errors import DataError
from ddptrain.mnist import MNIST_FILES, find, read_content


def verify(data_dir: str) -> int:
    """Print one line per file; returns 0, or 66 if any is absent or not MNIST's."""
    good = True
    print(f"{'file':<26}{'bytes':>12}  {'sha256 of content':<18}verdict")
    for file in MNIST_FILES:
        try:
            content = read_content(Path(data_dir), file)
            digest = hashlib.sha256(content).hexdigest()
            size, verdict = f"{len(content):,}", "ok" if digest == file.sha256 else "not MNIST's content"
        except DataError as error:
            absent = find(Path(data_dir), file) is None
            size, digest, verdict = "-", "-", "absent" if absent else str(error)
        good &= verdict == "ok"
        print(f"{file.name:<26}{size:>12}  {digest[:16]:<18}{verdict}")
    if not good:
        print(f"next:  ddptrain data fetch --data-dir {data_dir}")
    return 0 if good else DataError.code
