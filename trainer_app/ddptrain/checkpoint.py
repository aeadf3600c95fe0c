"""Checkpoints on a shared volume, written by rank 0 alone, that survive any kill and prove their own integrity.

Layout: ``run-000003/step-000000250.pt`` with its manifest ``step-000000250.json``. Every start claims a new run by an
exclusive mkdir, so two writers never share a directory, and a writer that sees a higher run knows that it is a ghost.
``train`` saves and resumes through ``Checkpoints``; the ``eval`` verb only reads, through ``newest_valid``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import Mismatch, Superseded, VolumeError, volume_error
from ddptrain.files import share, sync_directory, unique, write_atomically
from ddptrain.finite import dumps

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
    except FileNotFoundError:
        return []  # a start that could not claim it has taken it back
    return sorted(found, reverse=True)


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
    except (ValueError, KeyError, TypeError):
        return "manifest is not readable", {}, b""
    if manifest["format"] != FORMAT:
        raise Mismatch(
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


def quarantine(manifest_path: Path) -> None:
    """Rename manifest and file to ``*.corrupt``, so that no later start looks at them and a person still can."""
    for path in (manifest_path, manifest_path.with_suffix(".pt")):
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(path.name + ".corrupt"))


class Checkpoints:
    """Rank 0's writer: one claimed run in ``root``.

    Args:
        keep: how many of the newest valid checkpoints, over all runs, survive a save.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self._keep = root, keep
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
            probe = self.root / unique(".probe")
            write_atomically(probe, b"")
            probe.unlink(missing_ok=True)

    def resume(self, say: Callable[[str], None]) -> tuple[Saved, bytes] | None:
        """The checkpoint to go on from; bad ones are quarantined, and said."""

        def bad(path: Path, reason: str) -> None:
            say(f"checkpoint {path} is unusable: {reason}; set aside as *.corrupt")
            quarantine(path)

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

    def save(self, step: int, content: bytes, facts: Mapping[str, Any]) -> Saved:
        """Write ``content`` and its manifest; returns once both are durable.

        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: the volume refused.
        """
        self.check_superseded()
        path = self.root / f"run-{self.run:06d}" / f"step-{step:09d}.pt"
        digest = hashlib.sha256(content).hexdigest()
        manifest = {**facts, "format": FORMAT, "run": self.run, "step": step, "sha256": digest, "bytes": len(content)}
        manifest["seal"] = seal(manifest)
        try:
            with self._writing():
                write_atomically(path, content)
                write_atomically(path.with_suffix(".json"), dumps(manifest, indent=1).encode())
                ours_is_first = self.last is None or self.last.run != self.run
                # Until our own first save has been read back, the parent's checkpoint is the only one to trust.
                if ours_is_first and (reason := fault(path.with_suffix(".json"))[0]):
                    raise OSError(f"the checkpoint just written reads back damaged: {reason}")
                self.last = Saved(self.run, step, path, manifest)
                self._retire()
        except VolumeError:
            self.check_superseded()  # a newer run may have cleared away what we were writing
            raise
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
        for run in run_numbers(self.root):
            if run < self.run:
                folder = self.root / f"run-{run:06d}"
                leftovers += folder.glob(".step-*.tmp")  # not owner.json: its run may have been claimed just now
                leftovers += [path for path in folder.glob("step-*.pt") if not path.with_suffix(".json").exists()]
        for path in leftovers:
            path.unlink(missing_ok=True)

    def _retire(self) -> None:
        """Delete all but the newest ``keep`` checkpoints of all runs, oldest last, manifest first."""
        everything = [path for run in run_numbers(self.root) for _, path in manifests(self.root, run)]
        for path in everything[self._keep :]:
            path.unlink(missing_ok=True)
            path.with_suffix(".pt").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise volume_error(error, error.filename or self.root) from error
