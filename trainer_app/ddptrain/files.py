"""Writing so that a reader sees the old file or the new one, never half of one, even after a power cut.

Below all that writes: ``checkpoint_writer``, ``journal``, ``progress`` and ``postmortem`` in a training; ``fetch``,
``infer`` and ``export`` for what a person asked for.

JSON that every reader accepts: NaN and infinities, which only Python's parser knows, become null.

Whatever the package writes or prints as JSON passes through ``dumps``; it stands below everything and imports nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError, volume_error

# What file systems without modes (CIFS, some FUSE and NFS) answer to chmod, and those that cannot sync a directory.
_NO_MODES = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP}

# Set by ``chaos`` alone: every durable write fails with this number, as on a full volume.
refusal = 0


def unique(name: str) -> str:
    """``name`` with what no other process writing to a shared volume has: in pods, even process ids are alike."""
    return f"{name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Temporary file beside the target, written, synced, renamed; then the directory is synced.

    Args:
        durable: False leaves out the syncs, for files that may be lost with the node but must not be torn.
    Raises:
        OSError: the volume refused; no temporary file is left behind then.
    """
    if refusal and durable:
        raise OSError(refusal, os.strerror(refusal), str(path))
    temporary = path.with_name(f".{unique(path.name)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        try:
            share(temporary, 0o664)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_result(path: Path, content: bytes) -> None:
    """Write what a person asked for by name: atomically, behind a link, or into a device or pipe, which stays one.

    Raises:
        VolumeError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a rename would put a file in the place of /dev/null
            with path.open("wb") as stream:
                stream.write(content)
        else:
            write_atomically(path.resolve(), content)
    except OSError as error:
        raise volume_error(error, path) from error


def make_directory(flag: str, path: str) -> Path:
    """The directory that ``flag`` names, made where it is not there yet.

    Raises:
        UsageError: it cannot be.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be made: {error.strerror}", next_step="name a directory that can be written"
        ) from error
    return Path(path)


def share(path: Path, mode: int) -> None:
    """Give the group what the umask took: the next pod of the job may have another uid and share only the fsGroup."""
    with _ignoring(_NO_MODES):
        path.chmod(mode)


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` survive a power cut, where the file system knows how."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _ignoring(_NO_DIRECTORY_SYNC):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ignoring(numbers: set[int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def finite(value: Any) -> Any:
    """The value with null for every float that is not finite, however deep in dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """As ``json.dumps``, of finite values."""
    return json.dumps(finite(value), indent=indent, sort_keys=sort_keys, allow_nan=False)
