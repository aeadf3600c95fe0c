"""Files of a volume written here: resumed where an earlier transfer ended, checked by digest, renamed when complete.

A file arrives as ``.NAME.ddpjob-part`` beside its place. The part stays when the transfer ends early, also by SIGKILL,
and the next transfer asks for the rest only. The digest of the whole file is compared at the end, so that a part of
another file, or one that a power cut has damaged, is noticed; the file is then asked for from its beginning, once.

The image that sends the files is not trusted: only a file that an earlier transfer wrote is replaced, and no link below
the directory is followed. A ``.git/config`` of a volume would run commands at the next ``git status``.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import NoReturn

from ddpjob.api.objects import Json
from ddpjob.client.volume.contents import (
    RECORD,
    CutError,
    Pulled,
    PulledFile,
    PullProgress,
    Volume,
    VolumeFile,
    Wanted,
    damaged,
    list_volume,
    wanted_files,
)
from ddpjob.errors import DamagedFileError, TransferError

_REQUEST = 4096  # characters of one request; a command in a URL of 8 KiB passes every proxy
_ROUNDS = 5  # of listing and copying, before a training is faster than the copy
_LONGEST_NAME = 240  # bytes that leave room for the suffix
_GONE = (errno.ENOENT, errno.ESTALE)


def pull(
    volume: Volume, to: Path, *, steps: Collection[int] = (), metrics: bool = False, everything: bool = False
) -> Pulled:
    """Copy what is wanted of the volume into ``to``; for the arguments see ``Client.pull``.

    Raises:
        InvalidJobError: the volume holds nothing of the kind.
        TransferError: the disk is full or refuses, a file is in the way, or one was deleted on the volume each time.
        DamagedFileError: a digest differs.
        UnavailableError: the volume could not be read for too long.
    """
    done: dict[str, PulledFile] = {}
    for _ in range(_ROUNDS):  # a training that goes on deletes checkpoints: list again what is there now
        contents, files = list_volume(volume)
        wanted = wanted_files(contents, files, steps, metrics=metrics, everything=everything)
        try:
            transfer = _Transfer(volume, _Directory(to), [one for one in wanted if one.file.path not in done])
            transfer.run()
        except OSError as error:
            raise _disk_error(error, to) from error
        done |= transfer.done
        if not transfer.gone:
            break
    if transfer.gone and not everything:
        raise _gone(volume.job, transfer.gone[0])
    return Pulled(
        job=volume.job,
        namespace=volume.namespace,
        to=str(to.absolute()),
        files=[*done.values()] if everything else [done[one.file.path] for one in wanted],
        complete=not everything or not (contents.unlisted or transfer.gone),
    )


class _Directory:
    """The directory that gets the files, with a record of what transfers wrote."""

    def __init__(self, to: Path) -> None:
        to.mkdir(parents=True, exist_ok=True)
        self._root = Path(os.path.realpath(to))
        self._written: set[bytes] = set()  # lines of the record
        with contextlib.suppress(FileNotFoundError), open(self._root / RECORD, "rb", opener=_not_a_link) as record:
            self._written.update(record)

    def place(self, path: str) -> Path:
        """Return where a file belongs; its folder is created. Raises ``OSError`` if that would follow a link."""
        place = self._root / path
        if os.path.realpath(place.parent) != str(place.parent):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place.parent))
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def note(self, path: str, sha256: str) -> None:
        """Record a file before it gets its name, so that after a kill the next transfer may replace it."""
        with open(self._root / RECORD, "ab", opener=_not_a_link) as record:
            record.write(_entry(path, sha256))

    def whole(self, file: VolumeFile) -> str | None:
        """Return the digest of a file that is here in this size; None if there is none, or it may be replaced.

        Raises ``TransferError`` if it is another one, which no transfer wrote, or which has changed since.
        """
        place, digest = self.place(file.path), ""
        try:
            found = place.lstat()
        except FileNotFoundError:
            return None
        if stat.S_ISREG(found.st_mode):
            digest = _sha256(place)
            if found.st_size == file.bytes:
                return digest
        self.require_written(file.path, digest)
        return None

    def require_written(self, path: str, sha256: str) -> None:
        if _entry(path, sha256) not in self._written:
            raise TransferError(
                f"{self._root / path} is here already, and is not as an earlier pull wrote it",
                "a pull replaces only files that it wrote itself, and that are unchanged since",
                "move it away, or name another directory with --to",
            )


def _entry(path: str, sha256: str) -> bytes:
    return json.dumps({"path": path, "sha256": sha256}).encode() + b"\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _not_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _part_of(place: Path) -> Path:
    """Return the path of a part. A name has at most 255 bytes, so a long name is replaced by its digest."""
    name = place.name if len(place.name.encode()) <= _LONGEST_NAME else hashlib.sha256(place.name.encode()).hexdigest()
    return place.with_name(f".{name}.ddpjob-part")


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[FileIO]:
    """Open a part to append to it, under a lock: two transfers never write one file. At the end, none stays empty."""
    with open(part, "ab", buffering=0, opener=_not_a_link) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TransferError(
                f"another process copies {part}",
                "two transfers would write one file",
                "wait for it, or use another --to",
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            yield stream
        finally:
            if not stream.tell():
                part.unlink(missing_ok=True)


class _Transfer:
    """Copies files of a volume into a directory. done: what has arrived. gone: paths that the volume has no more."""

    def __init__(self, volume: Volume, directory: _Directory, wanted: Sequence[Wanted]) -> None:
        self._volume, self._directory, self._left = volume, directory, [*wanted]
        self._total, self._finished = sum(one.file.bytes for one in wanted), 0  # bytes
        self._here: dict[str, str | None] = {}  # by path: the digest of the file if it is here
        self._repeated: set[str] = set()  # paths of files that had another digest than what was here of them
        self.done: dict[str, PulledFile] = {}
        self.gone: list[str] = []

    def run(self) -> None:
        """Copy the files; a cut connection is made again."""
        while self._left:
            asked = self._next_request()
            try:
                with contextlib.closing(self._volume.messages("send", json.dumps(asked))) as messages:
                    for one in self._left[: len(asked)]:
                        self._receive(one, messages)
                        self._left.remove(one)
                        self._finished += one.file.bytes
            except CutError as cut:
                self._volume.wait_after(cut)

    def _next_request(self) -> list[tuple[str, int, int]]:
        """Return path, offset and size of the first files that are left."""
        asked: list[tuple[str, int, int]] = []
        for file, _ in self._left:
            if file.path not in self._here:
                self._here[file.path] = self._directory.whole(file)
            part = _part_of(self._directory.place(file.path))
            have = file.bytes if self._here[file.path] else part.stat().st_size if part.is_file() else 0
            asked.append((file.path, have, file.bytes))
            if len(json.dumps(asked)) > _REQUEST:
                break
        return asked

    def _receive(self, one: Wanted, messages: Iterator[Json | bytes]) -> None:
        """Take what is sent of one file. Raises ``CutError`` if it must be asked for again."""
        (file, wanted), place = one, self._directory.place(one.file.path)
        here, part = self._here[file.path], _part_of(place)
        with contextlib.nullcontext() if here else _locked(part) as stream:
            digest = self._written(file, stream, messages)
            if digest is None:
                self.gone.append(file.path)
                return
            if digest == (here or _sha256(part)) and wanted in (None, digest):
                size = file.bytes
                if stream is not None:
                    modified, size = datetime.fromisoformat(file.modified).timestamp(), stream.tell()
                    os.utime(part, (modified, modified))
                    os.fsync(stream.fileno())
                    self._directory.note(file.path, digest)
                    part.replace(place)
                self.done[file.path] = PulledFile(path=file.path, bytes=size, sha256=digest)
                return
            if stream is not None:
                part.unlink()
        if wanted not in (None, digest):
            raise damaged(self._volume.job, file.path, "its content does not match the digest in its manifest")
        self._ask_again(file.path, here)

    def _written(self, file: VolumeFile, stream: FileIO | None, messages: Iterator[Json | bytes]) -> str | None:
        """Write the bytes of a file, and return the digest that it has on the volume; None if it is gone there."""
        volume = self._volume
        for message in messages:
            match message:
                case bytes() if stream is not None:  # else nothing was asked for
                    volume.patience.reset()
                    view = memoryview(message)
                    while view:
                        view = view[stream.write(view) :]
                case {"sent": path, "sha256": str(digest)} if path == file.path:
                    volume.patience.reset()
                    return digest
                case {"failed": path, "errno": number, "reason": reason} if path == file.path:
                    if number not in _GONE:
                        raise _unreadable(volume.job, path, reason)
                    return None
            done = self._finished + (file.bytes if stream is None else min(stream.tell(), file.bytes))
            volume.on_progress(PullProgress(path=file.path, done=done, total=self._total))
        raise CutError(f"{file.path} was not sent")

    def _ask_again(self, path: str, here: str | None) -> NoReturn:
        """Begin again with nothing, once. The files behind it wait: a manifest says that its checkpoint is here."""
        if path in self._repeated:
            raise DamagedFileError(
                f"{path} does not have the digest here that it has on the volume of {self._volume.job}",
                "it changed while it was copied, or the network or the disk here damages data",
                f"ddpjob pull {self._volume.job} again, when the job does not run",
            )
        self._repeated.add(path)
        if here is not None:
            self._directory.require_written(path, here)
            self._here[path] = None
        raise CutError(f"{path} differs from the file that was here")


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
    return TransferError(
        f"cannot write {error.filename or to}: {error.strerror or error}; what has arrived is kept",
        "the disk is full, it belongs to another user, or a file or a symbolic link has the name of a directory",
        "make room, or name another directory with --to; then the same command continues",
    )
