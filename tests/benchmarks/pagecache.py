"""Drop files from the page cache, and count their cached bytes. Needs no root, and affects no other files."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop(folder: Path) -> int:
    """Drop the pages of all files in a folder from the page cache, and return the size of the files in bytes.

    Pages that a running program has mapped stay; see ``resident``.
    """
    total = 0
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            total += os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return total


def resident(folder: Path) -> int:
    """Return how many bytes of the files in a folder are in the page cache (mincore(2))."""
    return sum(_resident(path) for path in _files(folder))


def _resident(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            del start  # the mapping cannot be closed before
        return sum(page & 1 for page in vector) * mmap.PAGESIZE


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
