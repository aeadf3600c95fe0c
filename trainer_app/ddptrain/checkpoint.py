"""Checkpoints on a shared volume that prove their own integrity, read: which there are, and which is the newest valid.

Layout: ``run-000003/step-000000250.pt`` with its manifest ``step-000000250.json``. Every start claims a new run by an
exclusive mkdir, so two writers never share a directory, and a writer that sees a higher run knows that it is a ghost.
``checkpoint_writer`` writes them; whoever only reads, such as the verbs ``eval`` and ``ckpt``, comes here.
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

from ddptrain.errors import DataError, Mismatch
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
    except (FileNotFoundError, NotADirectoryError):
        return []  # a start that could not claim it has taken it back; a file of that name holds nothing
    return sorted(found, reverse=True)


@contextlib.contextmanager
def reading(root: Path) -> Iterator[None]:
    """For who only looks: inside, a volume that cannot be read is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
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


def set_aside(manifest_path: Path, suffix: str) -> None:
    """Rename manifest and file to ``*.suffix``, so that no later start looks at them and a person still can.

    Raises:
        OSError: the volume refused.
    """
    for path in (manifest_path, manifest_path.with_suffix(".pt")):
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}.{suffix}"))
