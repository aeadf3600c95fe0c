"""A directory as one compressed tar archive, small enough for a Secret."""

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpjob.client.workdir.files import SourceFile, files_of, too_large
from ddpjob.errors import InvalidJobError

MAX_BYTES = 1_000_000
"""Of the compressed archive. An API server takes 1,048,576 bytes of data in a Secret."""
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\r?\n|\\n)|^\s*client-key-data: \S", re.MULTILINE
)
_TIME = 315_532_800  # 1980, the first year that a zip file can have: the archive depends on the content alone
_LEVEL = 9


@dataclass(frozen=True)
class Archive:
    """A directory to send. digest: SHA-256 of the archive before compression. names: of its files."""

    data: bytes
    digest: str
    names: frozenset[str]


def pack(directory: Path, files: Sequence[SourceFile] | None = None) -> Archive:
    """Return the archive of a directory, or of some of its files; the same files give the same digest.

    Raises:
        InvalidJobError: a file cannot be read or sent, or there is too much.
    """
    files = files_of(directory) if files is None else files
    try:
        tar = _tar(files)
    except OSError as error:
        raise InvalidJobError(
            f"--workdir {directory}: {error.filename} cannot be read: {error.strerror or error}",
            "every file that is not ignored is sent",
            "correct its mode, or list it in .gitignore",
        ) from error
    data = gzip.compress(tar, _LEVEL, mtime=0)
    if len(data) > MAX_BYTES:
        sizes = {file.name: len(zlib.compress(file.path.read_bytes(), 1)) for file in files if not file.is_link}
        raise too_large(directory, f"{len(data):,} bytes when compressed, at most {MAX_BYTES:,} are allowed", sizes)
    return Archive(data, hashlib.sha256(tar).hexdigest(), frozenset(file.name for file in files))


def _tar(files: Sequence[SourceFile]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            entry = tarfile.TarInfo(file.name)
            entry.mtime = _TIME
            if file.is_link:
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file.path)  # noqa: PTH115 - as it is
                tar.addfile(entry)
                continue
            content = file.path.read_bytes()  # its length may differ from what the directory said
            if _PRIVATE_KEY.search(content) and not file.is_asked_for:
                raise InvalidJobError(
                    f"{file.path} holds a private key, so nothing is sent",
                    "users with the role edit can read the files of a job",
                    f"list it in .gitignore, or add !/{file.name} there to send it",
                )
            entry.size, entry.mode = len(content), 0o755 if file.path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
