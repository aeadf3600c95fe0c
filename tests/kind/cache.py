"""The cache of everything that the test cluster builds: its folder, names and locks.

Go binaries, file systems and images are stored under the digest of their inputs, so the same inputs are built once and
changed inputs never find an old result. The folder may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kind.command import step

_KEPT_SECONDS = 14 * 24 * 3600.0


def cache_dir() -> Path:
    """Return the cache's root, ``$DDPJOB_CACHE`` or ``~/.cache/ddpjob``, created if absent."""
    root = Path(os.environ.get("DDPJOB_CACHE") or Path.home() / ".cache" / "ddpjob").absolute()
    root.mkdir(parents=True, exist_ok=True)
    return root


def digest(*parts: str, files: Iterable[Path] = ()) -> str:
    """Return a 16-digit hexadecimal digest of these inputs.

    A file counts with name, executable bit and content, in any order. Each part is hashed with its length, so two
    different lists of inputs never give the same byte stream.
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
    """Return every file under ``folder`` except Python bytecode, sorted."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def forget_unused(folder: Path) -> None:
    """Delete entries of a cache folder that were not used for two weeks. Using an entry updates its mtime."""
    oldest = time.time() - _KEPT_SECONDS
    for entry in folder.iterdir():
        if entry.stat().st_mtime < oldest:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide an empty folder on the cache's file system, for results that are renamed to their place when complete.

    The folder is deleted at the end. Folders that killed processes left are deleted at the start.
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
    """Delete a folder, after unmounting what a Docker engine or debootstrap left mounted in it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], timeout=30, check=True)
    shutil.rmtree(folder)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock ``name``: one process builds, the others wait and then find the result.

    The kernel releases the lock when the process that holds it dies, so a killed run never blocks the next one.
    """
    folder = cache_dir() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"waiting for another process that holds the lock {name}"):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
