"""Checkpoints on a shared volume that prove their own integrity, read: which there are, and which is the newest valid.

Layout: ``run-000003/step-000000250.pt`` with its manifest ``step-000000250.json``. Every start claims a new run by an
exclusive mkdir, so two writers never share a directory, and a writer that sees a higher run knows that it is a ghost.
``checkpoint_writer`` writes them; whoever only reads, such as the verbs ``eval`` and ``ckpt``, comes here.

Rank 0's side of the checkpoints: claim a run, save so that any kill is survived, retire what is no longer needed.

The order of a save: content to a temporary file, fsync, rename, fsync of the folder; then its manifest in the same
way. A checkpoint exists once its manifest does. Whatever is deleted is deleted after something newer is durable.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import ConfigMismatch, DataMissing, Superseded, volume_error
from ddptrain.files import dumps, share, sync_directory, unique, write_atomically

FORMAT = 1
_RUN = re.compile(r"run-(\d{6,})$")
_MANIFEST = re.compile(r"step-(\d{9,})\.json$")


@dataclass(frozen=True)
class Saved:
    """One valid checkpoint: where it is, and what its manifest says."""

    run: int
    step: int
    path: Path
    manifest: dict[str, Any]

    @property
    def place(self) -> dict[str, int]:
        """``{"run": …, "step": …}`` as progress, metrics and the termination message spell it."""
        return {"run": self.run, "step": self.step}


def run_numbers(root: Path) -> list[int]:
    """Numbers of all runs, highest first."""
    found = [int(m[1]) for path in root.iterdir() if (m := _RUN.match(path.name))]
    return sorted(found, reverse=True)


def manifests(root: Path, run: int) -> list[tuple[int, Path]]:
    """(step, manifest path) of one run, highest step first."""
    folder = root / f"run-{run:06d}"
    try:
        found = [(int(m[1]), path) for path in folder.iterdir() if (m := _MANIFEST.match(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []  # a start that could not claim it has taken it back; a file of that name holds nothing
    return sorted(found, reverse=True)


@contextlib.contextmanager
def reading(root: Path) -> Iterator[None]:
    """For who only looks: inside, a volume that cannot be read is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataMissing(
            f"cannot read {error.filename or root}: {error.strerror or error}",
            hint="it belongs to another user, or the volume fails",
            next_step="check owner and mode of the directory and of all in it",
        ) from error


def newest_place(root: Path) -> dict[str, int] | None:
    """Run and step of the newest checkpoint by its name alone: for reports, which do not need its content."""
    with contextlib.suppress(OSError):
        for run in run_numbers(root):
            for step, _ in manifests(root, run):
                return {"run": run, "step": step}
    return None


def seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the manifest without its own seal: a flipped cursor is as bad as a flipped weight."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(dumps(body, sort_keys=True).encode()).hexdigest()


def fault(manifest_path: Path) -> tuple[str, dict[str, Any], bytes]:
    """(what is wrong or "", manifest, content of the checkpoint file).

    Raises:
        FileNotFoundError: another process has deleted the checkpoint, which is no fault of its own.
        OSError: the volume failed to read, which says nothing about the checkpoint; one file absent is a fault.
        Mismatch: the manifest is intact and of a format this version does not know.
    """
    try:
        manifest = json.loads(manifest_path.read_bytes())
        if manifest["seal"] != seal(manifest):
            return "manifest does not match its own digest", {}, b""
    except (ValueError, KeyError, TypeError, IsADirectoryError):
        return "manifest is not readable", {}, b""
    if manifest["format"] != FORMAT:
        raise ConfigMismatch(
            f"{manifest_path} has format {manifest['format']}, this version reads {FORMAT}",
            next_step="use the version of ddptrain that wrote it, or a new checkpoint directory",
        )
    run, step = manifest.get("run", 0), manifest.get("step", 0)
    if (manifest_path.parent.name, manifest_path.name) != (f"run-{run:06d}", f"step-{step:09d}.json"):
        return f"manifest is that of run {run}, step {step}", {}, b""
    try:
        content = manifest_path.with_suffix(".pt").read_bytes()
    except FileNotFoundError:
        if not manifest_path.exists():
            raise
        return "checkpoint file is absent", {}, b""
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        return "content does not match its digest", {}, b""
    return "", manifest, content


def newest_valid(
    root: Path,
    on_fault: Callable[[Path, str], None],
    *,
    run: int | None = None,
    step: int | None = None,
) -> tuple[Saved, bytes] | None:
    """The checkpoint of the highest run, then the highest step, that proves intact, with its content.

    Args:
        on_fault: told of each bad one (manifest path, reason); it may quarantine it.
        run, step: look only at these.
    """
    for number in run_numbers(root) if root.is_dir() else []:
        if run is not None and number != run:
            continue
        for at, path in manifests(root, number):
            if step is not None and at != step:
                continue
            try:
                reason, manifest, content = fault(path)
            except FileNotFoundError:
                continue  # its writer has retired it since the folder was listed
            if not reason:
                return Saved(number, at, path.with_suffix(".pt"), manifest), content
            on_fault(path, reason)
    return None


def set_aside(manifest_path: Path, suffix: str) -> None:
    """Rename manifest and file to ``*.suffix``, so that no later start looks at them and a person still can.

    Raises:
        OSError: the volume refused.
    """
    for path in (manifest_path, manifest_path.with_suffix(".pt")):
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}.{suffix}"))


_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBING = 60.0  # seconds; no start takes as long to prove that it can write


class Checkpoints:
    """Rank 0's writer: one claimed run in ``root``.

    Args:
        keep: how many of the newest valid checkpoints, over all runs, survive a save.
        keep_best: besides them, the one of the highest test accuracy does.

    Attributes:
        quarantined: how many bad ones ``resume`` has set aside.
    """

    def __init__(self, root: Path, *, keep: int, keep_best: bool = False) -> None:
        self.root, self._keep, self._keep_best = root, keep, keep_best
        self.quarantined = 0
        self.run = 0
        self.last: Saved | None = None

    def prepare(self) -> None:
        """Make the directory and prove that it can be written, before an hour of training finds out.

        Raises:
            VolumeError: it cannot.
        """
        with self._writing():
            if not self.root.is_dir():
                self.root.mkdir(parents=True, exist_ok=True)
                share(self.root, 0o2775)
                sync_directory(self.root.parent)
            probe = self.root / unique(".probe")
            write_atomically(probe, b"")
            probe.unlink(missing_ok=True)

    def resume(self, say: Callable[[str], None]) -> tuple[Saved, bytes] | None:
        """The checkpoint to go on from; bad ones are quarantined, and said."""

        def bad(path: Path, reason: str) -> None:
            self.quarantined += 1
            try:
                set_aside(path, "corrupt")
                done = "set aside as *.corrupt"
            except OSError as error:  # a finished run may lie on a volume that can only be read
                done = f"left there: {error.strerror}"
            say(f"checkpoint {path} is unusable: {reason}; {done}")

        with self._writing():
            found = newest_valid(self.root, bad)
        self.last = found[0] if found else None
        return found

    def claim(self, owner: Mapping[str, Any]) -> int:
        """Take the next run number by an exclusive mkdir, and write ``owner.json`` into it."""
        with self._writing():
            while True:
                number = max(run_numbers(self.root), default=0) + 1
                folder = self.root / f"run-{number:06d}"
                try:
                    folder.mkdir()
                except FileExistsError:
                    continue  # another start was faster
                share(folder, 0o2775)
                self.run = number
                self._clear_leftovers()  # first: a full volume may thereby have room for what follows
                parent = self.last.run if self.last else None
                try:
                    write_atomically(folder / "owner.json", dumps({**owner, "parentRun": parent}).encode())
                    sync_directory(self.root)
                except BaseException:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                    raise
                return number

    def save(self, step: int, content: bytes, facts: Mapping[str, Any], *, last: bool = False) -> Saved:
        """Write ``content`` and its manifest; returns once both are durable.

        Args:
            last: nothing comes after it, so on a full volume all but the newest older ones make room for it.
        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: the volume refused. What was saved before is untouched, no temporary file is left.
        """
        self.check_superseded()
        try:
            return self._save(step, content, facts)
        except OSError as error:
            self.check_superseded()  # a newer run may have cleared away what we were writing
            with self._writing():
                self._clear_own_leftovers(step)
                if not (last and error.errno in _FULL):
                    raise volume_error(error, error.filename or self.root) from error
                self._retire(1, keep_best=False)
                try:
                    return self._save(step, content, facts)
                except OSError:
                    self._clear_own_leftovers(step)
                    raise

    def _save(self, step: int, content: bytes, facts: Mapping[str, Any]) -> Saved:
        path = self.root / f"run-{self.run:06d}" / f"step-{step:09d}.pt"
        digest = hashlib.sha256(content).hexdigest()
        manifest = {**facts, "format": FORMAT, "run": self.run, "step": step, "sha256": digest, "bytes": len(content)}
        manifest["seal"] = seal(manifest)
        write_atomically(path, content)
        write_atomically(path.with_suffix(".json"), dumps(manifest, indent=1).encode())
        ours_is_first = self.last is None or self.last.run != self.run
        # Until our own first save has been read back, the parent's checkpoint is the only one to trust.
        if ours_is_first and (reason := fault(path.with_suffix(".json"))[0]):
            raise OSError(errno.EIO, f"the checkpoint just written reads back damaged: {reason}", str(path))
        self.last = Saved(self.run, step, path, manifest)
        self._retire(self._keep, keep_best=self._keep_best)
        return self.last

    def check_superseded(self) -> None:
        """Raise Superseded if a higher run exists."""
        with self._writing():
            highest = max(run_numbers(self.root), default=0)
        if highest > self.run:
            raise Superseded(
                f"run {highest} has claimed {self.root}; this is run {self.run}",
                hint="a newer attempt of the job is training; this process is a leftover",
            )

    def _clear_leftovers(self) -> None:
        """Half-written files of earlier runs; whoever still writes one is a ghost, and will find that out itself."""
        leftovers = list(self.root.glob(".progress.json.*.tmp"))
        leftovers += [path for path in self.root.glob(".*probe.*") if path.stat().st_mtime < time.time() - _PROBING]
        for run in run_numbers(self.root):
            if run < self.run:
                folder = self.root / f"run-{run:06d}"
                leftovers += folder.glob(".step-*.tmp")  # not owner.json: its run may have been claimed just now
                leftovers += [path for path in folder.glob("step-*.pt") if not path.with_suffix(".json").exists()]
        for path in leftovers:
            path.unlink(missing_ok=True)

    def _clear_own_leftovers(self, step: int) -> None:
        """What a save that failed has left: its content without the manifest, and temporary files."""
        folder = self.root / f"run-{self.run:06d}"
        with contextlib.suppress(OSError):
            content = folder / f"step-{step:09d}.pt"
            if not content.with_suffix(".json").exists():
                content.unlink(missing_ok=True)
            for path in folder.glob(".step-*.tmp"):
                path.unlink(missing_ok=True)

    def _retire(self, keep: int, *, keep_best: bool) -> None:
        """Delete all but the newest ``keep`` checkpoints of all runs and the best one, oldest last, manifest first."""
        everything = [path for run in run_numbers(self.root) for _, path in manifests(self.root, run)]
        best = max(everything, key=_accuracy, default=None) if keep_best else None
        for path in everything[keep:]:
            if path != best:
                with contextlib.suppress(OSError):  # what cannot be deleted stays; the newer one is on the disk
                    path.unlink(missing_ok=True)
                    path.with_suffix(".pt").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise volume_error(error, error.filename or self.root) from error


def _accuracy(manifest_path: Path) -> float:
    """Test accuracy recorded with a checkpoint; below any real one where none was measured, or none can be read."""
    try:
        evaluation = json.loads(manifest_path.read_bytes()).get("evaluation") or {}
        return float(evaluation.get("accuracy", -1.0))
    except (OSError, ValueError, AttributeError, TypeError):
        return -1.0
