"""Atomic and durable writes, writes in the background, and JSON without NaN. Used by every module that writes files."""

import contextlib
import errno
import json
import math
import os
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddprun.errors import UsageError, volume_errors

Json = dict[str, Any]

# Errors of chmod on file systems without modes (CIFS, some FUSE and NFS), and of fsync on a directory or a pipe.
_NO_MODES = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP}


def open_descriptors() -> set[int]:
    """Return the descriptors of this process, without that of the directory which lists them: it is free again."""
    return {int(entry.name) for entry in list(Path("/proc/self/fd").iterdir()) if entry.is_symlink()}


def close_all_but(kept: Collection[int]) -> None:
    """Close the descriptors of this process, a fork, that are its parent's, except 0 to 2 and ``kept``."""
    for descriptor in open_descriptors() - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):  # of a file on a volume that fails
            os.close(descriptor)


def unique(name: str) -> str:
    """Return ``name`` with a suffix that no other process uses; process ids are not enough, pods often share them."""
    return f"{name}.{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"


def write_atomically(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write and sync a temporary file in the target's directory, rename it to the target, and sync the directory.

    A reader sees the old content or the new, even after a power cut.

    Args:
        durable: False leaves out the syncs, for files that may be lost with the node.
    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
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
    """Write a file that the user named: atomically if it is a file or a link to one, in place if a device or pipe.

    Raises:
        VolumeError: it cannot be written.
    """
    with volume_errors(path):
        if path.exists() and not path.is_file():  # a rename would replace /dev/null by a file
            with path.open("wb") as stream:
                stream.write(content)
        else:
            write_atomically(path.resolve(), content)


class BackgroundWrite:
    """Calls ``write`` in a thread after each request, once for all requests that come while a call runs.

    A volume that does not answer stops that thread only, and not the training.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        self._write, self._requested, self._idle = write, threading.Event(), threading.Condition()
        self._pending = 0  # requests, the current call included
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Ask for a write; returns at once."""
        with self._idle:
            self._pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background-write", daemon=True)
            self._thread.start()
        self._requested.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is requested; return False if that takes longer than ``seconds``."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, seconds)

    def _run(self) -> None:
        while self._requested.wait():
            self._requested.clear()
            with self._idle:
                known = self._pending
            try:
                self._write()
            except Exception:  # an error of ours; later requests are carried out all the same
                traceback.print_exc()
            with self._idle:
                self._pending -= known
                self._idle.notify_all()


def make_directory(flag: str, path: str) -> Path:
    """Make the directory that the user gave with ``flag``, if it is absent, and return its path.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be made: {error.strerror}", next_step="give a directory that can be written"
        ) from error
    return Path(path)


def make_shared(directory: Path) -> None:
    """Make the directory, if it is absent, for pods of other uids, too."""
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        share(directory, 0o2775)
        sync_directory(directory.parent)


def share(path: Path, mode: int) -> None:
    """Set the mode in spite of the umask: the job's next pod may have another uid and share only the fsGroup."""
    with _ignoring(_NO_MODES):
        path.chmod(mode)


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` survive a power cut, if the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Make what was written survive a power cut, if the file system supports it for this kind of file."""
    with _ignoring(_NO_SYNC):
        os.fsync(descriptor)


@contextlib.contextmanager
def _ignoring(numbers: set[int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def finite(value: Any) -> Any:
    """Return the value with None for every NaN and infinity in it, at any depth of dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def with_named_loss(values: Mapping[str, Any]) -> Json:
    """Return the values; a loss that JSON has no number for is one of the texts NaN, Infinity and -Infinity.

    With null in its place, status and curves showed the last good loss for ever.
    """
    loss = values.get("loss")
    named = {"loss": json.dumps(loss)} if isinstance(loss, float) and not math.isfinite(loss) else {}
    return {**values, **named}


def dumps_json(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return JSON that every parser accepts: NaN and infinities become null."""
    return json.dumps(finite(value), indent=indent, sort_keys=sort_keys, allow_nan=False)
