"""Where the test cluster's builds are kept, how they are named, and who may write them.

Everything slow (Go binaries, file systems, images) lies in one folder under a name made of the digest of its inputs:
the same inputs are never built twice, changed inputs never meet an old result, and the folder may be deleted at any
time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_KEPT_SECONDS = 14 * 24 * 3600.0


def cache_dir() -> Path:
    """The cache's root: ``$DDPJOB_CACHE``, by default ``~/.cache/ddpjob``. Created when absent."""
    root = Path(os.environ.get("DDPJOB_CACHE") or Path.home() / ".cache" / "ddpjob").absolute()
    root.mkdir(parents=True, exist_ok=True)
    return root


def digest(*parts: str, files: Iterable[Path] = ()) -> str:
    """A 16-digit hexadecimal name for these inputs.

    Each part and each file (name, mode and content; the order does not matter) goes in with its length, so that no
    two different lists of inputs give the same byte stream.
    """
    sha = hashlib.sha256()

    def add(data: bytes) -> None:
        sha.update(len(data).to_bytes(8, "big"))
        sha.update(data)

    for part in parts:
        add(part.encode())
    for path in sorted(files):
        add(path.name.encode())
        add(oct(path.stat().st_mode & 0o111).encode())
        add(path.read_bytes())
    return sha.hexdigest()[:16]


def source_files(folder: Path) -> list[Path]:
    """Every file under ``folder`` that can change what is built from it."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def forget_unused(folder: Path) -> None:
    """Delete what lies in a folder of the cache and was not used for two weeks. Whoever uses an entry touches it."""
    oldest = time.time() - _KEPT_SECONDS
    for entry in folder.iterdir():
        if entry.stat().st_mtime < oldest:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder on the cache's file system, for work in progress; what is done is renamed to its place.

    It goes away at the end. What killed processes left of theirs goes away now.
    """
    parent = cache_dir() / "scratch"
    parent.mkdir(exist_ok=True)
    for folder in parent.iterdir():
        if not Path("/proc", folder.name.partition("-")[0]).exists():
            discard(folder)
    own = Path(tempfile.mkdtemp(dir=parent, prefix=f"{os.getpid()}-"))
    try:
        yield own
    finally:
        discard(own)


def discard(folder: Path) -> None:
    """Delete a folder, after unmounting what an engine or debootstrap left mounted in it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], timeout=30, check=True)
    shutil.rmtree(folder)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock ``name``: one process builds, the others wait and then find the result.

    The kernel releases the lock when its holder dies, so a killed run never blocks the next one.
    """
    folder = cache_dir() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is busy with {name}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
