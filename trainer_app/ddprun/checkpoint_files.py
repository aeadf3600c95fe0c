"""Checkpoints on a shared volume: claim a run, save, find the newest valid checkpoint, verify, and delete old ones.

Layout: ``run-000003/step-000000250.pt`` with its manifest ``step-000000250.json``. Each start claims a new run by an
exclusive mkdir, so two writers never share a directory, and a writer that finds a higher run knows that it is
superseded. A save writes a temporary file, syncs it, renames it and syncs the directory; then the manifest in the same
way. A checkpoint exists once its manifest does. Files are deleted only after something newer is durable. No torch.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ddprun.errors import ConfigMismatch, DataMissing, Superseded, TrainerError, VolumeError, volume_errors
from ddprun.files import Json, dumps_json, make_shared, share, sync_directory, unique, write_atomically

FORMAT = 1
_RUN = re.compile(r"run-(\d{6,})$")
_MANIFEST = re.compile(r"step-(\d{9,})\.json$")
# The types of a manifest's fields that this module reads; a program that is not this one may have written the file.
_FIELDS: dict[str, type] = {"run": int, "step": int, "sha256": str}
# Errors of loading that say nothing about the content; PyTorch quotes them in errors of its own.
_MACHINE_FAILED = re.compile(r"out of memory|allocate memory|CUDA error", re.IGNORECASE)
# What a read of one damaged file returns. Any other error is one of the volume, which says nothing about the file.
_FILE_DAMAGED = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
_READS, _READ_AGAIN = 3, 0.3  # times to read a file that gives such an error, and seconds between them


@dataclass(frozen=True)
class Saved:
    """One valid checkpoint, with the content of its manifest."""

    run: int
    step: int
    path: Path
    manifest: Json

    @property
    def place(self) -> Json:
        """The run, step and path as in progress, metrics and the termination report."""
        return reported_place(self.path, self.run, self.step)


def reported_place(file: Path, run: int, step: int, env: Mapping[str, str] = os.environ) -> Json:
    """Return a checkpoint as reports name it.

    The path is relative to DDPJOB_CHECKPOINT_DIR, so that no reader has to know this layout; without that variable, to
    the checkpoint directory. A file elsewhere has no path, because a reader could not find it.
    """
    place: Json = {"run": run, "step": step}
    base = Path(env.get("DDPJOB_CHECKPOINT_DIR") or file.parent.parent).absolute()
    if base in file.absolute().parents:
        place["path"] = str(file.absolute().relative_to(base))
    return place


def owner(env: Mapping[str, str]) -> Json:
    """Return what ``owner.json`` says about this process, which claims a run."""
    attempt = env.get("DDPJOB_ATTEMPT")
    number = int(attempt) if attempt and attempt.isdecimal() else attempt
    restarts = env.get("TORCHELASTIC_RESTART_COUNT") or ""
    life = int(restarts) + 1 if restarts.isdecimal() else 1
    host = socket.gethostname()
    return {"uid": env.get("DDPJOB_UID"), "attempt": number, "life": life, "host": host, "time": time.time()}


def claimed_runs(root: Path, *, life: int, since: float) -> Iterator[tuple[Path, int]]:
    """Yield directory and number of each run that this life of this machine has claimed since that time.

    Args:
        root: has the runs, or directories with them.
    """
    host = socket.gethostname()
    for file in chain.from_iterable(root.glob(f"{below}run-*/owner.json") for below in ("", "*/", "*/*/")):
        with contextlib.suppress(ValueError, KeyError, TypeError, FileNotFoundError, RecursionError):
            claim = json.loads(file.read_bytes())
            is_own = (claim["host"], claim["life"]) == (host, life) and claim["time"] >= since
            if is_own and (named := _RUN.match(file.parent.name)):
                yield file.parent.parent, int(named[1])


def run_folder(root: Path, run: int) -> Path:
    """Return the directory of a run."""
    return root / f"run-{run:06d}"


def checkpoint_file(root: Path, run: int, step: int) -> Path:
    """Return the path of a checkpoint; its manifest has the same name with the suffix ``.json``."""
    return run_folder(root, run) / f"step-{step:09d}.pt"


def run_numbers(root: Path) -> list[int]:
    """Return the numbers of all runs, highest first."""
    found = [int(m[1]) for path in root.iterdir() if (m := _RUN.match(path.name))]
    return sorted(found, reverse=True)


def manifests(root: Path, run: int) -> list[tuple[int, Path]]:
    """Return (step, manifest path) of each checkpoint of a run, highest step first."""
    try:
        found = [(int(m[1]), path) for path in run_folder(root, run).iterdir() if (m := _MANIFEST.match(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []  # a start that failed removed its run, or a file has the name of a run
    return sorted(found, reverse=True)


def all_manifests(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (run, step, manifest path) of every checkpoint, newest first; none if ``root`` is absent."""
    for run in run_numbers(root) if root.is_dir() else []:
        for step, path in manifests(root, run):
            yield run, step, path


def _candidates(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield what ``all_manifests`` does, then what was saved since: a writer may have deleted all that were listed."""
    seen: set[Path] = set()
    known = -1
    while known < len(seen):
        known = len(seen)
        for run, step, path in all_manifests(root):
            if path not in seen:
                seen.add(path)
                yield run, step, path


@contextlib.contextmanager
def reading(root: Path) -> Iterator[None]:
    """Raise DataMissing for an OSError, for verbs that only read."""
    try:
        yield
    except OSError as error:
        raise DataMissing(
            f"cannot read {error.filename or root}: {error.strerror or error}",
            hint="it belongs to another user, or the volume fails",
            next_step="check owner and mode of the directory and of everything in it",
        ) from error


def newest_place(root: Path) -> Json | None:
    """Return the newest checkpoint by its name, as reports name it; they do not need its content."""
    with contextlib.suppress(OSError):
        for run, step, _ in all_manifests(root):
            return reported_place(checkpoint_file(root, run, step), run, step)
    return None


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest without its seal: a wrong place in the data is as bad as a wrong weight."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(dumps_json(body, sort_keys=True).encode()).hexdigest()


def verify(manifest_path: Path) -> tuple[str, Json, bytes]:
    """Return (what is wrong or "", manifest, content of the checkpoint file).

    Raises:
        FileNotFoundError: another process deleted the checkpoint.
        OSError: the volume failed to read, which says nothing about the checkpoint.
        ConfigMismatch: the manifest is intact and of a format that this version does not know.
    """
    try:
        manifest = json.loads(manifest_path.read_bytes())
        if manifest["seal"] != seal(manifest):
            return "manifest does not match its own digest", {}, b""
    except (ValueError, KeyError, TypeError, IsADirectoryError, RecursionError):
        return "manifest is not readable", {}, b""
    if type(manifest.get("format")) is not int:
        return "manifest has no valid format", {}, b""
    if manifest["format"] != FORMAT:
        raise ConfigMismatch(
            f"{manifest_path} has format {manifest['format']}, but this version reads only format {FORMAT}",
            next_step="use the version of the trainer that wrote it, or a new checkpoint directory",
        )
    if wrong := [name for name, kind in _FIELDS.items() if type(manifest.get(name)) is not kind]:
        return f"manifest has no valid {', '.join(wrong)}", {}, b""
    run, step = manifest["run"], manifest["step"]
    if manifest_path != checkpoint_file(manifest_path.parent.parent, run, step).with_suffix(".json"):
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
    on_invalid: Callable[[Path, str], None],
    *,
    run: int | None = None,
    step: int | None = None,
    refuse: Callable[[Json, bytes], str] = lambda _manifest, _content: "",
    on_skipped: Callable[[Path], None] = lambda _path: None,
) -> tuple[Saved, bytes] | None:
    """Return the valid checkpoint of the highest run, then of the highest step, and its content.

    A checkpoint that cannot be read, or that ``refuse`` refuses, is skipped and stays where it is: a disk may recover,
    and a program that cannot load a checkpoint may be the wrong one.

    Args:
        on_invalid: called for each invalid one with (manifest path, reason); it may quarantine it.
        run, step: consider only these.
        refuse: returns why a valid checkpoint cannot be used; empty if it can.
        on_skipped: called with the manifest path of each that cannot be read or was refused.
    Raises:
        OSError: no checkpoint was found, and one could not be read; or the volume fails.
        ConfigMismatch: no checkpoint was found, and one was refused; or one is of an unknown format.
    """
    unreadable: OSError | None = None
    refused = ""
    for found_run, found_step, path in _candidates(root):
        if (run is not None and found_run != run) or (step is not None and found_step != step):
            continue
        try:
            reason, manifest, content = _verify_patiently(path)
        except FileNotFoundError:
            continue  # its writer deleted it since the directory was listed
        except OSError as error:
            if error.errno not in _FILE_DAMAGED:
                raise
            unreadable = error
            on_skipped(path)
            print(f"warning: {path} cannot be read, so an older checkpoint is used: {error.strerror}", file=sys.stderr)
            continue
        if reason:
            on_invalid(path, reason)
        elif why := refuse(manifest, content):
            refused = f"{path.with_suffix('.pt')} cannot be loaded: {why}"
            on_skipped(path)
            print(f"warning: {refused}; an older checkpoint is used", file=sys.stderr)
        else:
            return Saved(found_run, found_step, path.with_suffix(".pt"), manifest), content
    if unreadable is not None:
        raise unreadable
    if refused:
        raise ConfigMismatch(
            refused,
            hint="it is intact, but another program or another version of the model wrote it; no older one fits either",
            next_step="use the program that wrote it, or a new checkpoint directory",
        )
    return None


def _machine_failed(error: Exception) -> bool:
    """Return whether loading failed for want of memory or by the GPU, which says nothing about the content."""
    return isinstance(error, MemoryError) or bool(_MACHINE_FAILED.search(str(error)))


def _verify_patiently(path: Path) -> tuple[str, Json, bytes]:
    """Return what ``verify`` returns; read a file that gives an error again, because the error may pass."""
    for _ in range(_READS - 1):
        try:
            return verify(path)
        except OSError as error:
            if error.errno not in _FILE_DAMAGED:
                raise
        time.sleep(_READ_AGAIN)
    return verify(path)


def read_newest(root: Path, *, run: int | None = None, step: int | None = None) -> tuple[Saved, bytes]:
    """Return the newest valid checkpoint and its content, for verbs that only read; print a warning for invalid ones.

    Raises:
        DataMissing: there is none.
    """
    with reading(root):
        found = newest_valid(
            root, lambda path, reason: print(f"warning: {path}: {reason}", file=sys.stderr), run=run, step=step
        )
    if found is None:
        which = ", ".join(f"{name} {n}" for name, n in (("run", run), ("step", step)) if n is not None)
        raise DataMissing(
            f"no valid checkpoint{which and ' of ' + which} in {root}",
            hint="a checkpoint directory holds run-000001, run-000002 and so on",
            next_step="name the directory of a training that has saved one",
        )
    return found


def set_aside(manifest_path: Path, suffix: str) -> None:
    """Rename manifest and file to ``*.suffix``, so that later starts ignore them and a person can still examine them.

    Raises:
        OSError: the volume refused.
    """
    for path in (manifest_path, manifest_path.with_suffix(".pt")):
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}.{suffix}"))


_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBING = 60.0  # seconds; a probe file that is older belongs to a dead process


class Checkpoints:
    """Rank 0's writer of one claimed run in ``root``.

    Args:
        keep: how many of the newest valid checkpoints, over all runs, survive a save: 2 at least, because only the next
            loss shows whether the weights of the newest have diverged.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self._keep = root, max(keep, 2)
        self.run = 0
        self.last: Saved | None = None
        self._skipped: set[Path] = set()  # manifests that ``resume`` could not use

    def prepare(self) -> None:
        """Make the directory and write a probe file, so that a bad volume is found before the training.

        Raises:
            VolumeError: it cannot be written.
        """
        with volume_errors(self.root):
            make_shared(self.root)
            probe = self.root / unique(".probe")
            write_atomically(probe, b"")
            probe.unlink(missing_ok=True)

    def resume(
        self,
        log: Callable[[str], None],
        refuse: Callable[[Json, bytes], str] = lambda _manifest, _content: "",
    ) -> tuple[Saved, bytes] | None:
        """Return the newest valid checkpoint that ``refuse`` accepts; quarantine the invalid ones and report each.

        An exception of ``refuse`` is its reason, unless it is a TrainerError, or memory or the GPU failed.

        Raises:
            VolumeError: none can be read. ConfigMismatch: none is accepted.
        """

        def why_refused(manifest: Json, content: bytes) -> str:
            try:
                return refuse(manifest, content)
            except Exception as error:  # of torch.load, of the model or of the optimizer
                if isinstance(error, TrainerError) or _machine_failed(error):
                    raise
                return f"{type(error).__name__}: {str(error)[:300]}"

        def quarantine(path: Path, reason: str) -> None:
            try:
                set_aside(path, "corrupt")
                done = "set aside as *.corrupt"
            except OSError as error:  # a finished run may be on a read-only volume
                done = f"cannot be renamed: {error.strerror}"
            log(f"checkpoint {path} is unusable: {reason}; {done}")

        try:
            found = newest_valid(self.root, quarantine, refuse=why_refused, on_skipped=self._skipped.add)
        except OSError as error:
            raise VolumeError(
                f"cannot read {error.filename or self.root}: {error.strerror or error}",
                hint="the volume fails, or the files belong to another user; no older checkpoint can be read either",
                next_step="check the volume, and owner and mode of the files",
            ) from error
        self.last = found[0] if found else None
        return found

    def claim(self, owner: Mapping[str, Any], *, reserved: int = 0) -> int:
        """Claim the next run number by an exclusive mkdir, and write ``owner.json`` into it. Return the number.

        Args:
            reserved: the number that this start has had since it began, by the file of its metrics.
        Raises:
            Superseded: a newer start has claimed a higher number than the reserved one.
        """
        with volume_errors(self.root):
            while True:
                highest = max(run_numbers(self.root), default=0)
                if reserved and highest > reserved:
                    raise _superseded(self.root, highest, reserved)
                number = max(reserved, highest + 1)
                folder = run_folder(self.root, number)
                try:
                    folder.mkdir()
                except FileExistsError:
                    continue  # another start was faster
                share(folder, 0o2775)
                self.run = number
                self._clear_leftovers()  # first, because it may make room on a full volume
                parent = self.last.run if self.last else None
                try:
                    write_atomically(folder / "owner.json", dumps_json({**owner, "parentRun": parent}).encode())
                    sync_directory(self.root)
                except BaseException:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                    raise
                return number

    def save(
        self, step: int, content: bytes | memoryview, facts: Mapping[str, Any], *, required: bool = False
    ) -> Saved:
        """Write ``content`` and its manifest; return once both are durable.

        Args:
            required: without it the training fails, so a directory that was deleted is made again, and on a full volume
                all older checkpoints but the newest are deleted.
        Raises:
            Superseded: a newer start has claimed a higher run.
            VolumeError: it cannot be written. Earlier checkpoints are untouched, and no temporary file is left.
        """
        with volume_errors(self.root):
            if required and not self.root.is_dir():  # deleted; the weights must not be lost with it
                run_folder(self.root, self.run).mkdir(parents=True)
            self._check_superseded()
            try:
                return self._save(step, content, facts)
            except OSError as error:
                self._check_superseded()  # a newer run may have deleted the file being written
                if not (required and error.errno in _FULL):
                    raise
            self._retire(1)
            return self._save(step, content, facts)

    def _save(self, step: int, content: bytes | memoryview, facts: Mapping[str, Any]) -> Saved:
        path = checkpoint_file(self.root, self.run, step)
        manifest_path = path.with_suffix(".json")
        digest = hashlib.sha256(content).hexdigest()
        manifest = {**facts, "format": FORMAT, "run": self.run, "step": step, "sha256": digest}
        manifest["seal"] = seal(manifest)
        first = self.last is None or self.last.run != self.run
        try:
            write_atomically(path, content)
            write_atomically(manifest_path, dumps_json(manifest, indent=1).encode())
            if first:  # until this checkpoint is read back, the newest one of the run before is kept
                for file in (path, manifest_path):  # the next read comes from the volume, if the file system can do it
                    with contextlib.suppress(OSError), file.open("rb") as stream:
                        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if reason := verify(manifest_path)[0]:
                    raise OSError(errno.EIO, f"the new checkpoint is damaged when read back: {reason}", str(path))
        except OSError:
            with contextlib.suppress(OSError):
                if not manifest_path.exists():
                    path.unlink(missing_ok=True)
                for leftover in path.parent.glob(".step-*.tmp"):
                    leftover.unlink(missing_ok=True)
            raise
        self.last = Saved(self.run, step, path, manifest)
        self._retire(self._keep)
        if first:
            self._remove_old_runs()
        return self.last

    def _remove_old_runs(self) -> None:
        """Remove the folders of earlier runs that hold nothing any more, so that a save need not search them.

        Folders with checkpoints stay, and those with files that were set aside for a person.
        """
        for run in run_numbers(self.root):
            folder = run_folder(self.root, run)
            with contextlib.suppress(OSError):
                if run < self.run and {path.name for path in folder.iterdir()} <= {"owner.json"}:
                    (folder / "owner.json").unlink(missing_ok=True)
                    folder.rmdir()

    def _check_superseded(self) -> None:
        highest = max(run_numbers(self.root), default=0)
        if highest > self.run:
            raise _superseded(self.root, highest, self.run)

    def _clear_leftovers(self) -> None:
        """Delete temporary and incomplete files of earlier runs; their writers are dead or superseded."""
        leftovers = [path for path in self.root.glob(".*probe.*") if path.stat().st_mtime < time.time() - _PROBING]
        for folder in [run_folder(self.root, run) for run in run_numbers(self.root) if run < self.run]:
            leftovers += folder.glob(".step-*.tmp")  # not owner.json: another start may be writing it now
            leftovers += [path for path in folder.glob("step-*.pt") if not path.with_suffix(".json").exists()]
        for path in leftovers:
            path.unlink(missing_ok=True)

    def _retire(self, keep: int) -> None:
        """Delete all but the newest ``keep`` checkpoints of all runs: newest first, manifest first.

        Those that ``resume`` skipped stay, and none of them takes the place of a checkpoint that can be used.
        """
        everything = [path for _, _, path in all_manifests(self.root) if path not in self._skipped]
        for path in everything[keep:]:
            with contextlib.suppress(OSError):  # a file that cannot be deleted stays
                path.unlink(missing_ok=True)
                path.with_suffix(".pt").unlink(missing_ok=True)


def _superseded(root: Path, newer: int, own: int) -> Superseded:
    return Superseded(
        f"run {newer} has claimed {root}; this is run {own}",
        hint="a newer attempt of the job is training; this process belongs to an older one",
        next_step="end this process; the newer attempt continues the training",
    )
