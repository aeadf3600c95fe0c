"""Writing so that a reader sees the old file or the new one, never half of one, even after a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Temporary file beside the target, written, synced, renamed; then the directory is synced.

    Args:
        durable: False leaves out the syncs, for files that may be lost with the node but must not be torn.
    Raises:
        OSError: the volume refused; no temporary file is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o664)
        with os.fdopen(descriptor, "wb") as stream:
            share(temporary, 0o664)
            stream.write(content)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def share(path: Path, mode: int) -> None:
    """Give the group what the umask took: the next pod of the job may have another uid and share only the fsGroup."""
    with contextlib.suppress(PermissionError):  # volumes without modes of their own (CIFS, some NFS) refuse
        path.chmod(mode)


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
