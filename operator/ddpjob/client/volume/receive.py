"""Files of a volume written here: resumed where an earlier transfer ended, checked by digest, renamed when complete.

A file arrives as ``.NAME.ddpjob-part`` beside its place. The part stays when the transfer ends early, also by SIGKILL,
and the next transfer asks for the rest only. The digest of the whole file is compared at the end, so that a part of
another file, or one that a power cut has damaged, is noticed; the file is then asked for from its beginning, once.

The image that sends the files is not trusted: only a file that an earlier transfer wrote is replaced, and no link below
the directory is followed. A ``.git/config`` of a volume would run commands at the next ``git status``.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ddpjob.api.backoff import Patience
from ddpjob.client.volume.contents import RECORD, PulledFile, PullProgress, Wanted, damaged
from ddpjob.client.volume.messages import CutError, VolumeReader, messages
from ddpjob.errors import DamagedFileError, TransferError, UnavailableError

_REQUEST = 4096  # characters of one request; a command in a URL of 8 KiB passes every proxy
_OPEN_AT_ONCE = 100  # files, of two descriptors each; macOS allows 256
_READ = 1024 * 1024
_LONGEST_NAME = 240  # bytes that leave room for the suffix
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE, None)  # None: another file has its name, or it has become shorter
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW

OnProgress = Callable[[PullProgress], None]


def ignore(_progress: PullProgress) -> None:
    """Show nothing."""


def wait_after(cut: CutError, patience: Patience) -> None:
    """Wait before the next try. Raises ``UnavailableError`` if there is none.

    ``patience`` is reset after each new byte that has arrived.
    """
    if (delay := patience.delay(time.monotonic())) is None:
        raise UnavailableError(
            f"the volume could not be read for {patience.seconds:g} s: {cut}",
            "the API server, the kubelet of the pod or the volume does not answer",
            "run the same command again: it continues where it ended",
        ) from cut
    time.sleep(delay)


def receive(
    reader: VolumeReader, job: str, wanted: Sequence[Wanted], to: Path, *, on_progress: OnProgress, patience: Patience
) -> tuple[list[PulledFile], list[str]]:
    """Copy the files into ``to`` and return what became of each, and the paths that are gone from the volume.

    Raises:
        TransferError: the disk is full or refuses, a file is in the way, or a digest differs.
        UnavailableError: the volume could not be read for too long.
    """
    transfer = _Transfer(job, wanted, to, on_progress)
    try:
        transfer.begin()
        while asked := transfer.next_request():
            try:
                for message in messages(reader.output("send", json.dumps(asked))):
                    if transfer.take(message):
                        patience.reset()
                transfer.require_all(asked)
            except CutError as cut:
                on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
                wait_after(cut, patience)
    except OSError as error:
        raise _disk_error(error, to) from error
    finally:
        transfer.close()
    return transfer.done, transfer.gone


class _Target:
    """The directory that gets the files. written: digests of what transfers wrote, by path."""

    def __init__(self, to: Path) -> None:
        self.path = to
        self.written: dict[str, set[str]] = {}
        self._root: int | None = None

    def open(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(FileNotFoundError), self._record(os.O_RDONLY) as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last one may be cut
                    entry = json.loads(line)
                    self.written.setdefault(entry["path"], set()).add(entry["sha256"])

    def folder_of(self, path: str) -> int:
        """Return a descriptor of the folder of a path below, which is created, without following a link."""
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        for name in path.split("/")[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            above = folder
            try:
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=above)
            finally:
                os.close(above)
        return folder

    def note(self, path: str, sha256: str) -> None:
        """Record a file before it gets its name, so that after a kill the next transfer may replace it."""
        with self._record(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as lines:
            lines.write(json.dumps({"path": path, "sha256": sha256}) + "\n")
        self.written.setdefault(path, set()).add(sha256)

    def close(self) -> None:
        if self._root is not None:
            os.close(self._root)

    def _record(self, flags: int) -> TextIO:
        descriptor = os.open(RECORD, flags | _OPEN, 0o666, dir_fd=self._root)
        return os.fdopen(descriptor, "a" if flags else "r", encoding="utf-8")


class _Part:
    """One file on its way. have: its bytes that are here. Holds a lock, so that two transfers never write one file."""

    def __init__(self, wanted: Wanted, target: _Target) -> None:
        self.wanted, self.path, self._target = wanted, target.path / wanted.path, target
        self._part = _part_name(self.path.name)
        self._folder: int | None = None
        self._file: int | None = None
        self._digest: Any = hashlib.sha256()
        self._is_repeated = False
        self.have, self.was_here, self.is_old = 0, 0, False

    def size_here(self) -> int:
        """Return how many bytes need not be sent, without reading them. Raises ``TransferError`` as ``open``."""
        here = _state(self.path)
        if here is not None and here.st_size == self.wanted.bytes:
            return self.wanted.bytes
        if here is not None and self.wanted.path not in self._target.written:
            raise self._in_the_way()
        part = _state(self.path.with_name(self._part))
        return min(part.st_size, self.wanted.bytes) if part is not None else 0

    def open(self) -> None:
        """Read what is here: a whole file of this size, else the part.

        Raises ``TransferError`` if another file is here that no transfer wrote, or that has changed since.
        """
        if self.have or self._file is not None:
            return
        if self._folder is None:
            self._folder = self._target.folder_of(self.wanted.path)
        if not self._is_repeated and self._read_here():
            return
        descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | _OPEN, 0o666, dir_fd=self._folder)
        try:
            _lock(descriptor, self.path)
        except TransferError:
            os.close(descriptor)
            raise
        self._file = descriptor
        if os.fstat(self._file).st_size > self.wanted.bytes:
            os.ftruncate(self._file, 0)
        self._read(self._file)

    def _read_here(self) -> bool:
        """Return whether a file of this size is here, which is read."""
        try:
            descriptor = os.open(self.path.name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._in_the_way()
        self._read(descriptor)
        self.is_old = True
        if self.have == self.wanted.bytes:
            return True
        self._forget_old()
        return False

    def _forget_old(self) -> None:
        if self.is_old and self._digest.hexdigest() not in self._target.written.get(self.wanted.path, ()):
            raise self._in_the_way()
        self._digest, self.have, self.was_here, self.is_old = hashlib.sha256(), 0, 0, False

    def _in_the_way(self) -> TransferError:
        return TransferError(
            f"{self.path} is here already, and is not as an earlier pull wrote it",
            "a pull replaces only files that it wrote itself, and that are unchanged since",
            "move it away, or name another directory with --to",
        )

    @property
    def is_known(self) -> bool:
        """Whether an old file has the digest that it must have, so that it need not be asked for."""
        return self.is_old and self._digest.hexdigest() == self.wanted.sha256

    def write(self, data: bytes) -> bool:
        """Return whether a byte of it is new."""
        if self._file is None:  # nothing was asked for
            return False
        view = memoryview(data)[: self.wanted.bytes - self.have]
        self._digest.update(view)
        before = self.have
        self.have += len(view)
        while view:
            view = view[os.write(self._file, view) :]
        return self.have > before

    def matches(self, sha256: str) -> bool:
        return self.have == self.wanted.bytes and self._digest.hexdigest() == sha256

    def begin_again(self) -> bool:
        """Discard what is here. Return False if that has been done already."""
        again, self._is_repeated = not self._is_repeated, True
        self._forget_old()
        self.close()
        return again

    def finish(self, sha256: str, problem: str | None) -> PulledFile:
        """Give the file its name."""
        if self._file is not None:
            modified = datetime.fromisoformat(self.wanted.modified).timestamp()
            os.utime(self._file, (modified, modified))
            os.fsync(self._file)
            self._target.note(self.wanted.path, sha256)
            os.replace(self._part, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.close()
        outcome: Any = "Unchanged" if self.is_old else "Resumed" if self.was_here else "Copied"
        wanted = self.wanted
        return PulledFile(path=wanted.path, bytes=wanted.bytes, sha256=sha256, outcome=outcome, problem=problem)

    def close(self) -> None:
        if self._file is not None:
            if not self.have:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._part, dir_fd=self._folder)
            os.close(self._file)
        if self._folder is not None:
            os.close(self._folder)
        self._file = self._folder = None

    def _read(self, descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0, closefd=descriptor != self._file) as stream:
            while data := stream.read(_READ):
                self._digest.update(data)
                self.have += len(data)
        self.was_here = self.have


def _part_name(name: str) -> str:
    """Return the name of a part; a file system takes 255 bytes, so that of a long name has its digest."""
    if len(name.encode()) > _LONGEST_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f".{name}.ddpjob-part"


class _Transfer:
    """The files that are not done, and those that are."""

    def __init__(self, job: str, wanted: Sequence[Wanted], to: Path, on_progress: OnProgress) -> None:
        self._job, self._target, self._on_progress = job, _Target(to), on_progress
        self._left = {file.path: _Part(file, self._target) for file in wanted}
        self._total = sum(file.bytes for file in wanted)
        self._finished = 0  # bytes
        self._current: _Part | None = None
        self.done: list[PulledFile] = []
        self.gone: list[str] = []

    def begin(self) -> None:
        """Raise ``TransferError`` if a file is in the way, or the disk has too little room for what is missing."""
        self._target.open()
        missing = sum(part.wanted.bytes - part.size_here() for part in self._left.values())
        if (free := shutil.disk_usage(self._target.path).free) < missing:
            raise TransferError(
                f"{self._target.path} has too little room: {missing:,} bytes are missing, {free:,} are free",
                "the disk is full, or the volume holds more than you meant",
                "make room, or name another directory with --to",
            )

    def next_request(self) -> list[tuple[str, int, int, int]]:
        """Return path, offset, size and inode of files to ask for; none when all are done."""
        asked: list[tuple[str, int, int, int]] = []
        for part in [*self._left.values()]:
            part.open()
            if part.is_known:
                self._finish(part, str(part.wanted.sha256))
                continue
            asked.append((part.wanted.path, part.have, part.wanted.bytes, part.wanted.inode))
            if len(json.dumps(asked)) > _REQUEST or len(asked) == _OPEN_AT_ONCE:
                break
        return asked

    def take(self, message: Any) -> bool:
        """Take one message of the reader. Return whether it brought something new."""
        is_new = False
        match message:
            case {"begin": path}:
                self._current = self._left.get(path)
            case bytes() if self._current is not None:
                is_new = self._current.write(message)
            case {"sent": path, "sha256": str(digest)} if path in self._left:
                self._end(self._left[path], digest)
                is_new = True
            case {"failed": path, "reason": reason} if path in self._left:
                if message.get("errno") not in _GONE:
                    raise _unreadable(self._job, path, reason)
                self._left.pop(path).close()
                self._current = None
                self.gone.append(path)
                is_new = True
            case _:
                return False
        at = self._current.have if self._current is not None else 0
        path = self._current.wanted.path if self._current is not None else ""
        self._on_progress(PullProgress(path=path, done=self._finished + at, total=self._total))
        return is_new

    def require_all(self, asked: Sequence[tuple[str, int, int, int]]) -> None:
        """Raise ``CutError`` if one of these files has not arrived."""
        if missing := next((path for path, *_ in asked if path in self._left), None):
            raise CutError(f"{missing} was not sent")

    def close(self) -> None:
        for part in self._left.values():
            part.close()
        self._target.close()

    def _end(self, part: _Part, digest: str) -> None:
        wanted = part.wanted.sha256
        problem = None if wanted in (None, digest) else "its content does not match the digest in its manifest"
        if problem and part.wanted.is_chosen:
            part.begin_again()
            raise damaged(self._job, part.wanted.path, problem)
        if part.matches(digest):
            self._finish(part, digest, problem)
        elif part.begin_again():
            # The files behind it must wait: a manifest says that its checkpoint is here.
            raise CutError(f"{part.wanted.path} differs from the file that was here")
        else:
            raise DamagedFileError(
                f"{part.path} does not have the digest that it has on the volume of {self._job}",
                "it changed while it was copied, or the network or the disk here damages data",
                f"ddpjob pull {self._job} again, when the job does not run",
            )

    def _finish(self, part: _Part, digest: str, problem: str | None = None) -> None:
        self.done.append(part.finish(digest, problem))
        del self._left[part.wanted.path]
        self._finished += part.wanted.bytes
        self._current = None


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl  # noqa: PLC0415 - missing on some systems

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TransferError(
            f"another process copies {path}", "two transfers would write one file", "wait for it, or use another --to"
        ) from error
    except (ImportError, OSError):  # a file system without locks
        return


def gone(job: str, path: str) -> TransferError:
    """Return the error about a file that is gone each time that it is asked for."""
    return TransferError(
        f"{path} was deleted or replaced on the volume of {job} while it was copied",
        "a training that goes on deletes its older checkpoints",
        f"ddpjob pull {job} copies the newest; a suspended or finished job deletes none",
    )


def _unreadable(job: str, path: str, reason: str) -> TransferError:
    return TransferError(
        f"{path} on the volume of {job} cannot be read: {reason}",
        "the file belongs to another user, it was replaced, or the volume fails",
        f"check owner and mode of the file; ddpjob checkpoints {job} lists the others",
    )


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _disk_error(error: OSError, to: Path) -> TransferError:
    if error.errno in _FULL:
        return TransferError(
            f"the disk of {to} is full",
            "what has arrived is kept",
            "make room, then run the same command again: it continues",
        )
    return TransferError(
        f"cannot write {error.filename or to}: {error.strerror or error}",
        "it belongs to another user, or a file or a symbolic link has the name of a directory",
        "check it, or name another directory with --to",
    )
