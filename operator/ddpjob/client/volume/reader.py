"""The program that reads a volume: it lists the files, and sends parts of them. Standard library only, Python 3.7.

Its text runs in a pod with the image of the job, so it imports nothing of this package. For a job of this machine
``output_of_folder`` calls the same functions.

Output: one JSON object a line. Behind ``{"data": N}`` come N bytes of a file. ``{"working": …}`` says nothing but that
the program works.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_FILES, MOST_OF_FOLDER = 20_000, 5_000
"""Of a volume that also holds a data set, the rest is not listed. What trainings write comes first."""
_PART = 256 * 1024  # bytes
_SIGN_OF_LIFE = 16 * 1024 * 1024  # bytes that are read without any output
_MANIFEST = re.compile(r"(?:^|/)run-(\d{6,})/step-(\d{9,})\.json$")
_OF_TRAINING = re.compile(r"^(?:run-\d{6,}|metrics|logs)$")
_FORMAT = 1  # of a manifest
_DIGEST = re.compile("^[0-9a-f]{64}$")
_END_OF_TIME = 2.0**37  # seconds; Python has dates up to the year 9999
_IDLE_SECONDS = 120.0
_LOOK_SECONDS = 2.0


def listing(root: str, verify: bool) -> Generator[bytes, None, None]:
    """Yield the files and checkpoints below ``root``, then ``end``: what is not listed, and why.

    verify: also read the checkpoints and compare their digests.
    """
    unlisted: list[str] = []
    count = 0
    for path in _files(root, unlisted):
        count += 1
        if count > MOST_FILES:
            unlisted.append(f"there are more than {MOST_FILES} files")
            break
        try:
            found = Path(root, path).lstat()
        except OSError:
            continue  # deleted since its folder was read
        if not stat.S_ISREG(found.st_mode):
            continue
        yield _line({"file": {"path": path, "bytes": found.st_size, "modified": found.st_mtime}})
        name = _MANIFEST.search(path)
        if name:
            yield from _checkpoint(root, path, int(name.group(1)), int(name.group(2)), verify)
    yield _line({"end": {"unlisted": unlisted[:100]}})


def send(root: str, wanted: Sequence[tuple[str, int, int]]) -> Generator[bytes, None, None]:
    """Yield of each file (path, offset, size) its bytes from offset on, and the digest of all its bytes.

    size: the file must have so many bytes at least. One with fewer is being written again.
    """
    for path, offset, size in wanted:
        try:
            digest = yield from _content(root, path, offset, size)
        except OSError as error:
            yield _line({"failed": path, "errno": error.errno, "reason": error.strerror})
        else:
            yield _line({"sent": path, "sha256": digest})
    yield _line({"end": {}})


def _content(root: str, path: str, offset: int, size: int = 0) -> Generator[bytes, None, str]:
    """Yield the bytes of a file from offset on, up to the size that it has now, and return the digest of the whole."""
    digest, done = hashlib.sha256(), 0
    with Path(root, path).open("rb") as stream:
        size = max(size, os.fstat(stream.fileno()).st_size)
        while done < size:
            data = stream.read(min(_PART, size - done))
            if not data:
                raise OSError(errno.ESTALE, "it has become shorter")
            digest.update(data)
            if done + len(data) > offset:
                sent = data[max(offset - done, 0) :]
                yield _line({"data": len(sent)}) + sent
            elif done % _SIGN_OF_LIFE < _PART:
                yield _line({"working": path})
            done += len(data)
    return digest.hexdigest()


def _checkpoint(root: str, path: str, run: int, step: int, verify: bool) -> Generator[bytes, None, None]:
    """Yield the checkpoint of a manifest: state Intact, Unverified, Damaged or Unreadable, and the problem."""
    file = path[: -len(".json")] + ".pt"
    found: dict[str, Any] = {"run": run, "step": step, "path": file, "saved": None}
    try:
        manifest, problem = _manifest(Path(root, path), run, step)
        if not problem:
            found.update(sha256=manifest["sha256"], bytes=Path(root, file).stat().st_size, saved=_time(manifest))
            if verify and (yield from _content(root, file, sys.maxsize)) != manifest["sha256"]:
                problem = "its content does not match the digest in its manifest"
        found["state"] = "Damaged" if problem else "Intact" if verify else "Unverified"
    except FileNotFoundError:
        if not Path(root, path).exists():
            return  # the training has deleted the checkpoint meanwhile
        found["state"], problem = "Damaged", "its file is absent"
    except OSError as error:
        found["state"], problem = "Unreadable", str(error.strerror)
    yield _line({"checkpoint": {**found, "problem": problem or None}})


def _manifest(path: Path, run: int, step: int) -> tuple[dict[str, Any], str]:
    """Return a manifest, and what is wrong with it. ``ddprun.checkpoint_files`` has the form; a test compares both."""
    content, name = path.read_bytes(), f"step-{step:09d}.json"
    try:
        manifest = json.loads(content)
        body = {key: value for key, value in manifest.items() if key != "seal"}
        text = json.dumps(body, sort_keys=True, allow_nan=False)
        if manifest["seal"] != hashlib.sha256(text.encode()).hexdigest():
            return {}, "its manifest does not match its own digest"
        if type(manifest["format"]) is not int or manifest["format"] != _FORMAT:
            return {}, f"its manifest has the format {manifest['format']!r:.20}, which this version does not know"
        if json.dumps([manifest["run"], manifest["step"], path.name]) != json.dumps([run, step, name]):  # true is not 1
            return {}, "its manifest is that of another checkpoint"
        if not _DIGEST.match(manifest["sha256"]):
            return {}, "its manifest has no digest of its content"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, "its manifest is not readable"
    return manifest, ""


def _time(manifest: dict[str, Any]) -> float | None:
    """Return when a checkpoint was saved, which says nothing about its content; None if that is no time."""
    saved = manifest.get("time")
    return saved if isinstance(saved, (int, float)) and 0 <= saved < _END_OF_TIME else None


def _files(root: str, unlisted: list[str]) -> Iterator[str]:
    """Yield the paths below ``root``, level by level; links are not followed.

    Hidden files are left out: a write that goes on, or commands for git, a shell or an editor. ``.metadata`` is of a
    checkpoint of ``torch.distributed.checkpoint``, which is none without it.

    unlisted: gets what else is left out.
    """
    first: list[str] = [""]
    others: deque[str] = deque()
    while first or others:
        folder = first.pop() if first else others.popleft()
        try:
            with os.scandir(Path(root, folder)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            unlisted.append(f"{folder or '.'}: {error.strerror}"[:300])
            continue
        count = 0
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            try:
                path.encode()
            except UnicodeError:
                unlisted.append(ascii(path)[:200] + ": its name is not UTF-8")
                continue
            if entry.name.startswith(".") and entry.name != ".metadata":
                continue
            if entry.is_dir(follow_symlinks=False):
                (first if _OF_TRAINING.match(entry.name) else others).append(path)
            else:
                count += 1
                if count <= MOST_OF_FOLDER:
                    yield path
        if count > MOST_OF_FOLDER:
            unlisted.append(f"{folder or '.'}: {count} files, of which {MOST_OF_FOLDER} are listed"[:300])


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def wait() -> None:
    """Return when no other process of this container has run for two minutes, or after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container has no default for it
    used = time.monotonic()
    while time.monotonic() - used < _IDLE_SECONDS:
        time.sleep(_LOOK_SECONDS)
        if sum(path.name.isdigit() for path in Path("/proc").iterdir()) > 1:
            used = time.monotonic()


def output_of_folder(root: str, command: str, *arguments: str) -> Generator[bytes, None, None]:
    """Return the output of ``list [verify]`` or ``send WANTED`` below a directory."""
    return listing(root, bool(arguments)) if command == "list" else send(root, json.loads(arguments[0]))


def main(arguments: Sequence[str]) -> None:
    """Run ``wait``, ``list ROOT [verify]`` or ``send ROOT WANTED``."""
    command, *rest = arguments
    if command == "wait":
        wait()
        return
    written = time.monotonic()
    for piece in output_of_folder(rest[0], command, *rest[1:]):
        sys.stdout.buffer.write(piece)
        if time.monotonic() - written > 1.0:
            sys.stdout.buffer.flush()
            written = time.monotonic()
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
