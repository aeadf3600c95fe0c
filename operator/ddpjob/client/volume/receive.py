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
import stat
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ddpjob.api.backoff import Patience
from ddpjob.client.volume.contents import (
    RECORD,
    Choice,
    CutError,
    OnProgress,
    Pulled,
    PulledFile,
    PullProgress,
    Volume,
    Wanted,
    damaged,
    ignore,
    list_volume,
    wait_after,
    wanted_files,
)
from ddpjob.errors import DamagedFileError, TransferError

_REQUEST = 4096  # characters of one request; a command in a URL of 8 KiB passes every proxy
_OPEN_AT_ONCE = 100  # files, of two descriptors each; macOS allows 256
_READ = 1024 * 1024
_ROUNDS = 5  # of listing and copying, before a training is faster than the copy
_LONGEST_NAME = 240  # bytes that leave room for the suffix
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE, None)  # None: another file has its name, or it has become shorter
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def pull(volume: Volume, to: Path, choice: Choice, on_progress: OnProgress | None = None) -> Pulled:
    """Copy what is wanted of the volume into ``to``."""
    patience, shown = Patience(), on_progress or ignore
    done: dict[str, PulledFile] = {}
    missing: list[str] = []
    for _ in range(_ROUNDS):  # a training that goes on deletes checkpoints: list again what is there now
        contents, files = list_volume(volume, shown, patience)
        wanted = wanted_files(contents, files, choice)
        left = [one for one in wanted if one.file.path not in done]
        copied, missing = _received(volume, left, to, on_progress=shown, patience=patience)
        done |= {file.path: file for file in copied}
        if not missing:
            break
    if missing and not choice.everything:
        raise _gone(volume.job, missing[0])
    return Pulled(
        job=volume.job,
        namespace=volume.namespace,
        to=str(to.absolute()),
        files=[*done.values()] if choice.everything else [done[one.file.path] for one in wanted],
        complete=not choice.everything or not (contents.unlisted or missing),
    )


def _received(
    volume: Volume, wanted: Sequence[Wanted], to: Path, *, on_progress: OnProgress, patience: Patience
) -> tuple[list[PulledFile], list[str]]:
    """Copy the files into ``to`` and return what was copied, and the paths that are gone from the volume.

    Raises:
        TransferError: the disk is full or refuses, a file is in the way, or a digest differs.
        UnavailableError: the volume could not be read for too long.
    """
    try:
        with contextlib.closing(_Transfer(volume.job, wanted, to, on_progress)) as transfer:
            while asked := transfer.next_request():
                try:
                    for message in volume.messages("send", json.dumps(asked)):
                        if transfer.take(message):
                            patience.reset()
                    transfer.require_all(asked)
                except CutError as cut:
                    on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
                    wait_after(cut, patience)
            return transfer.done, transfer.gone
    except OSError as error:
        raise _disk_error(error, to) from error


class _Target:
    """The directory that gets the files. written: digests of what transfers wrote, by path."""

    def __init__(self, to: Path) -> None:
        self.path = to
        self.written: dict[str, set[str]] = {}
        to.mkdir(parents=True, exist_ok=True)
        self._root = os.open(to, _FOLDER)
        with contextlib.suppress(FileNotFoundError), self._record(os.O_RDONLY) as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last one may be cut
                    entry = json.loads(line)
                    self.written.setdefault(entry["path"], set()).add(entry["sha256"])

    def folder_of(self, path: str) -> int:
        """Return a descriptor of the folder of a path below, which is created, without following a link."""
        folder = os.open(".", _FOLDER, dir_fd=self._root)
        for name in path.split("/")[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            above = folder
            try:
                folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
        return folder

    def note(self, path: str, sha256: str) -> None:
        """Record a file before it gets its name, so that after a kill the next transfer may replace it."""
        with self._record(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as lines:
            lines.write(json.dumps({"path": path, "sha256": sha256}) + "\n")
        self.written.setdefault(path, set()).add(sha256)

    def close(self) -> None:
        os.close(self._root)

    def _record(self, flags: int) -> TextIO:
        descriptor = os.open(RECORD, flags | _OPEN, 0o666, dir_fd=self._root)
        return os.fdopen(descriptor, "a" if flags else "r", encoding="utf-8")


class _Part:
    """One file on its way. have: its bytes that are here. Holds a lock, so that two transfers never write one file."""

    def __init__(self, wanted: Wanted, target: _Target) -> None:
        self.wanted, self.file, self._target = wanted, wanted.file, target
        self.path = target.path / wanted.file.path
        name = self.path.name  # a file system takes 255 bytes, so the part of a long name has the digest of the name
        name = name if len(name.encode()) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()
        self._part = f".{name}.ddpjob-part"
        self._folder: int | None = None
        self._file: int | None = None
        self._digest: Any = hashlib.sha256()
        self._is_repeated = False
        self.have, self._is_old = 0, False

    def open(self) -> None:
        """Read what is here: a whole file of this size, else the part.

        Raises ``TransferError`` if another file is here that no transfer wrote, or that has changed since.
        """
        if self.have or self._file is not None:
            return
        if self._folder is None:
            self._folder = self._target.folder_of(self.file.path)
        if not self._is_repeated and self._read_here():
            return
        descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | _OPEN, 0o666, dir_fd=self._folder)
        try:
            _lock(descriptor, self.path)
        except TransferError:
            os.close(descriptor)
            raise
        self._file = descriptor
        if os.fstat(self._file).st_size > self.file.bytes:
            os.ftruncate(self._file, 0)
        self._read(self._file)

    def _read_here(self) -> bool:
        """Return whether a file of this size is here, which is read."""
        try:
            descriptor = os.open(self.path.name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self._in_the_way()
            self._read(descriptor)
        finally:
            os.close(descriptor)
        self._is_old = True
        if self.have == self.file.bytes:
            return True
        self._forget_old()
        return False

    def _forget_old(self) -> None:
        if self._is_old and self._digest.hexdigest() not in self._target.written.get(self.file.path, ()):
            raise self._in_the_way()
        self._digest, self.have, self._is_old = hashlib.sha256(), 0, False

    def _in_the_way(self) -> TransferError:
        return TransferError(
            f"{self.path} is here already, and is not as an earlier pull wrote it",
            "a pull replaces only files that it wrote itself, and that are unchanged since",
            "move it away, or name another directory with --to",
        )

    def write(self, data: bytes) -> bool:
        """Return whether a byte of it is new."""
        if self._file is None:  # nothing was asked for
            return False
        view = memoryview(data)[: self.file.bytes - self.have]
        self._digest.update(view)
        before = self.have
        self.have += len(view)
        while view:
            view = view[os.write(self._file, view) :]
        return self.have > before

    def matches(self, sha256: str) -> bool:
        return self.have == self.file.bytes and self._digest.hexdigest() == sha256

    def begin_again(self) -> bool:
        """Discard what is here. Return False if that has been done already."""
        again, self._is_repeated = not self._is_repeated, True
        self._forget_old()
        self.close()
        return again

    def finish(self, sha256: str) -> None:
        """Give the file its name."""
        if self._file is not None:
            modified = datetime.fromisoformat(self.file.modified).timestamp()
            os.utime(self._file, (modified, modified))
            os.fsync(self._file)
            self._target.note(self.file.path, sha256)
            os.replace(self._part, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.close()

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
        with open(descriptor, "rb", buffering=0, closefd=False) as stream:
            while data := stream.read(_READ):
                self._digest.update(data)
                self.have += len(data)


class _Transfer:
    """The files that are not done, and those that are."""

    def __init__(self, job: str, wanted: Sequence[Wanted], to: Path, on_progress: OnProgress) -> None:
        self._job, self._target, self._on_progress = job, _Target(to), on_progress
        self._left = {one.file.path: _Part(one, self._target) for one in wanted}
        self._total = sum(one.file.bytes for one in wanted)
        self._finished = 0  # bytes
        self._current: _Part | None = None
        self.done: list[PulledFile] = []
        self.gone: list[str] = []

    def next_request(self) -> list[tuple[str, int, int, int]]:
        """Return path, offset, size and inode of files to ask for; none when all are done."""
        asked: list[tuple[str, int, int, int]] = []
        for part in self._left.values():
            part.open()
            asked.append((part.file.path, part.have, part.file.bytes, part.file.inode))
            if len(json.dumps(asked)) > _REQUEST or len(asked) == _OPEN_AT_ONCE:
                break
        return asked

    def take(self, message: Any) -> bool:
        """Take one message of the reader. Return whether it brought something new."""
        is_new = True
        match message:
            case {"begin": path}:
                self._current, is_new = self._left.get(path), False
            case bytes() if self._current is not None:
                is_new = self._current.write(message)
            case {"sent": path, "sha256": str(digest)} if path in self._left:
                self._end(self._left[path], digest)
            case {"failed": path, "reason": reason} if path in self._left:
                if message.get("errno") not in _GONE:
                    raise _unreadable(self._job, path, reason)
                self._left.pop(path).close()
                self._current = None
                self.gone.append(path)
            case _:
                return False
        at, path = (self._current.have, self._current.file.path) if self._current is not None else (0, "")
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
        file, wanted = part.wanted
        if wanted not in (None, digest):
            part.begin_again()
            raise damaged(self._job, file.path, "its content does not match the digest in its manifest")
        if part.matches(digest):
            part.finish(digest)
            self.done.append(PulledFile(path=file.path, bytes=file.bytes, sha256=digest))
            del self._left[file.path]
            self._finished += file.bytes
            self._current = None
        elif part.begin_again():
            # The files behind it must wait: a manifest says that its checkpoint is here.
            raise CutError(f"{file.path} differs from the file that was here")
        else:
            raise DamagedFileError(
                f"{part.path} does not have the digest that it has on the volume of {self._job}",
                "it changed while it was copied, or the network or the disk here damages data",
                f"ddpjob pull {self._job} again, when the job does not run",
            )


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


def _gone(job: str, path: str) -> TransferError:
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
