"""What the volume of a job holds (``VolumeContents``), what of it is wanted, and what ``pull`` has copied.

The JSON of ``VolumeContents`` is that of ``ddpjob checkpoints -o json``, the JSON of ``Pulled`` that of
``ddpjob pull -o json``.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ddpjob.api.backoff import Patience
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.volume.reader import MOST_FILES
from ddpjob.errors import DamagedFileError, DDPJobError, InvalidJobError, UnavailableError

_METRICS = re.compile(r"(?:^|/)metrics(?:/run-\d{6,})?\.jsonl$")
RECORD = ".ddpjob-pulled"
"""In a directory with copies: their digests, one JSON object a line."""
_LONGEST_PATH, _LONGEST_LINE = 4096, 1024 * 1024  # characters, bytes


class CutError(Exception):
    """The output ended before its end: the connection was cut, or the pod is gone. Asking again may succeed."""


class VolumeFile(WireModel):
    """One file of the volume."""

    path: str
    """Path in the volume, relative to the directory of the job."""
    bytes: int = Field(ge=0)
    """Size when it was listed."""
    modified: str
    """When it was last written."""


class CheckpointFile(WireModel):
    """One checkpoint that ``ddprun.checkpoints`` or ``ddptrain`` saved."""

    run: int
    """Number of the run that saved it; each start that saves has another one."""
    step: int
    """Finished optimizer steps."""
    path: str
    """Path of its file in the volume; its manifest has the same name with the suffix .json."""
    bytes: int | None = None
    """Size of its file."""
    saved: str | None = None
    """When it was saved."""
    sha256: str | None = None
    """Digest of its content, from the manifest."""
    state: Literal["Intact", "Unverified", "Damaged", "Unreadable"]
    """Intact: the content was read and has the digest. Unverified: only the manifest was read."""
    problem: str | None = None
    """What is wrong."""

    @property
    def pair(self) -> tuple[str, str]:
        """Paths of its file and its manifest."""
        return self.path, self.path.removesuffix(".pt") + ".json"


class VolumeContents(WireModel):
    """What the directory of a job on its volume holds."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    claim: str
    """Name of the PersistentVolumeClaim; on this machine it is a directory."""
    directory: str
    """Where the trainer has the volume, on this machine the directory itself."""
    checkpoints: list[CheckpointFile]
    """The newest first; a resumed training begins with the first one that is intact."""
    metrics: list[VolumeFile]
    """The metrics of each run."""
    others: list[VolumeFile]
    """All other files: also checkpoints in a form of the script's own."""
    unlisted: list[str]
    """Folders that could not be read, or not as a whole, with the reason. Hidden files are never listed."""


class PulledFile(WireModel):
    """One file that ``pull`` was asked for."""

    path: str
    """Path in the volume, and below the directory it was copied to."""
    bytes: int
    """Its size."""
    sha256: str
    """Digest of its content, which is the same on the volume and here."""


class Pulled(WireModel):
    """What ``pull`` has copied."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    to: str
    """Directory on this machine."""
    files: list[PulledFile]
    """The files, in the order in which they were copied."""
    complete: bool = True
    """False if all files were asked for, and the volume has more than could be listed and copied."""
    agreed: str | None = None
    """Of these files, the newest checkpoint at which all ranks are known to have had the same parameters."""

    @property
    def paths(self) -> list[Path]:
        """The files on this machine."""
        return [Path(self.to, file.path) for file in self.files]


@dataclass(frozen=True)
class PullProgress:
    """How far a pull or a check is.

    waiting: what it waits for, while no bytes flow; empty while they do. path: the file that is read. done, total:
    bytes of all files, those included that were here already; 0 while they are not known.
    """

    waiting: str = ""
    path: str = ""
    done: int = 0
    total: int = 0


OnProgress = Callable[[PullProgress], None]


def ignore(_progress: PullProgress) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Volume:
    """The volume of a job: fields of ``VolumeContents``, and what runs ``reader`` beside it.

    output: yields the output of ``list`` or ``send`` and their arguments; it may raise ``CutError``. patience: is reset
    by each message that brings something new.
    """

    job: str
    namespace: str
    claim: str
    directory: str
    output: Callable[..., Generator[bytes, None, None]]
    on_progress: OnProgress = ignore
    patience: Patience = field(default_factory=Patience)

    def messages(self, *command: str) -> Generator[Json | bytes, None, None]:
        """Yield the objects that a command sends, and the bytes of files as they arrive, up to ``end``.

        Raises:
            CutError: the output ended before.
            UnavailableError: it is not that of ``reader``.
        """
        with contextlib.closing(self.output(*command)) as output:
            yield from _messages(output)

    def wait_after(self, cut: CutError) -> None:
        """Wait before the next try. Raises ``UnavailableError`` if there is none."""
        self.on_progress(PullProgress(waiting=f"the connection was cut: {cut}"))
        if (delay := self.patience.delay(time.monotonic())) is None:
            raise UnavailableError(
                f"the volume could not be read for {self.patience.seconds:g} s: {cut}",
                "the API server, the kubelet of the pod or the volume does not answer",
                "run the same command again: it continues where it ended",
            ) from cut
        time.sleep(delay)


def _messages(output: Iterable[bytes]) -> Iterator[Json | bytes]:
    rest, left = b"", 0  # left: bytes of a file that are still to come
    for piece in output:
        rest += piece
        while rest:
            if left:
                part, rest = rest[:left], rest[left:]
                left -= len(part)
                yield part
                continue
            line, end, after = rest.partition(b"\n")
            if len(line) > _LONGEST_LINE:
                raise _not_of_reader(line)
            if not end:
                break
            rest = after
            try:
                message = json.loads(line)
                if (left := int(message.get("data", 0))) < 0:
                    raise ValueError(left)
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise _not_of_reader(line) from error
            yield message
            if "end" in message:
                return
    raise CutError("the output ended early")


def _not_of_reader(output: object) -> UnavailableError:
    """Return the error about output that arrived whole and is wrong: asking again would bring the same."""
    return UnavailableError(
        f"this is not the output of the reader: {output!r:.100}",
        "python3 of the job's image prints something else, or the volume holds names or times that are not valid",
        "check the image of the job and the files on its volume",
    )


Files = dict[str, VolumeFile]
"""All files of a volume, by path."""


def list_volume(volume: Volume, *, verify: bool = False) -> tuple[VolumeContents, Files]:
    """Return what a volume holds, and all its files; a cut connection is made again.

    verify: read the checkpoints and compare their digests.

    Raises:
        UnavailableError: it could not be read for too long, or this is not the output of the reader.
    """
    known = 0
    while True:
        files: Files = {}
        checkpoints: list[CheckpointFile] = []
        unlisted: list[str] = []
        try:
            for number, message in enumerate(volume.messages("list", *(["verify"] if verify else [])), 1):
                if number > known:
                    known = number
                    volume.patience.reset()
                if isinstance(message, dict) and "working" in message:
                    volume.on_progress(PullProgress(path=str(message["working"])))
                _add(message, files, checkpoints, unlisted)
            return _contents(volume, files, checkpoints, unlisted), files
        except CutError as cut:
            volume.wait_after(cut)


def _add(message: Json | bytes, files: Files, checkpoints: list[CheckpointFile], unlisted: list[str]) -> None:
    """Add what a message of ``list`` says. Raises ``UnavailableError`` if it is wrong."""
    try:
        match message:
            case {"file": _} | {"checkpoint": _} if max(len(files), len(checkpoints)) >= MOST_FILES:
                raise ValueError("too many")
            case {"file": {"path": path, "modified": modified, **fields}}:
                files[path] = VolumeFile.model_validate(fields | {"path": _safe(path), "modified": _time(modified)})
            case {"checkpoint": {"path": path, "saved": saved, **fields}}:
                known = fields | {"path": _safe(path), "saved": _time(saved)}
                checkpoints.append(CheckpointFile.model_validate(known))
            case {"end": end}:
                unlisted += map(str, end.get("unlisted") or ())
    except (ValueError, TypeError, AttributeError, OverflowError, OSError) as error:  # of pydantic, too
        raise _not_of_reader(message) from error


def _contents(volume: Volume, files: Files, checkpoints: list[CheckpointFile], unlisted: list[str]) -> VolumeContents:
    # A training that goes on may have deleted the file since the manifest was read.
    found = [each for each in checkpoints if each.problem or all(path in files for path in each.pair)]
    of_checkpoints = {path for checkpoint in found for path in checkpoint.pair}
    rest = [file for path, file in files.items() if path not in of_checkpoints]
    return VolumeContents(
        job=volume.job,
        namespace=volume.namespace,
        claim=volume.claim,
        directory=volume.directory,
        checkpoints=sorted(found, key=lambda checkpoint: (-checkpoint.run, -checkpoint.step, checkpoint.path)),
        metrics=[file for file in rest if _METRICS.search(file.path)],
        others=[file for file in rest if not _METRICS.search(file.path)],
        unlisted=unlisted,
    )


class Wanted(NamedTuple):
    """One file to copy. sha256: the digest that its content must have."""

    file: VolumeFile
    sha256: str | None = None


def wanted_files(
    contents: VolumeContents, files: Files, steps: Collection[int], *, metrics: bool, everything: bool
) -> list[Wanted]:
    """Return the files to copy; for the other arguments see ``Client.pull``.

    The file of a checkpoint comes before its manifest: a checkpoint exists once its manifest does.

    Raises:
        InvalidJobError: there is nothing of the kind.
        DamagedFileError: a checkpoint that was asked for is damaged.
    """
    if everything:
        if not files:
            raise _nothing(contents, "no files but hidden ones")
        return [Wanted(files[path]) for path in sorted(files, key=lambda path: (path.endswith(".json"), path))]
    chosen: list[Wanted] = []
    if steps or not metrics:
        for step in sorted(set(steps)) or (None,):
            found = _checkpoint(contents, step)
            content, manifest = found.pair
            chosen += Wanted(files[content], found.sha256), Wanted(files[manifest])
    if metrics and not contents.metrics:
        raise _nothing(contents, "no metrics")
    return chosen + [Wanted(file) for file in contents.metrics if metrics]


def _checkpoint(contents: VolumeContents, step: int | None) -> CheckpointFile:
    """Return the newest checkpoint without a problem; of a step if one is given."""
    found = [checkpoint for checkpoint in contents.checkpoints if step in (None, checkpoint.step)]
    if best := next((checkpoint for checkpoint in found if checkpoint.problem is None), None):
        return best
    if step is None:
        raise _nothing(contents, "no checkpoint")
    if found:
        raise damaged(contents.job, found[0].path, str(found[0].problem))
    known = ", ".join(str(found.step) for found in contents.checkpoints[:10]) or "none"
    raise InvalidJobError(
        f"the volume of {contents.job} holds no checkpoint of step {step}",
        f"there are checkpoints of the steps {known}; older ones are deleted by the training",
        f"ddpjob checkpoints {contents.job}",
    )


def no_volume(job: str) -> InvalidJobError:
    """Return the error about a job without ``checkpoint``."""
    return InvalidJobError(
        f"the job {job} has no volume",
        "spec.checkpoint names the claim or the claimTemplate for checkpoints and metrics",
        "add it to the job: docs/tasks/write-a-job.md; what its nodes printed is in its logs",
    )


def damaged(job: str, path: str, problem: str) -> DamagedFileError:
    """Return the error about a checkpoint that was asked for."""
    return DamagedFileError(
        f"{path} on the volume of {job} is damaged: {problem}",
        "the volume failed, or another program wrote into the file; a training resumes from an older checkpoint",
        f"ddpjob checkpoints {job} shows which are intact; ddpjob pull {job} --step N copies one of them",
    )


def _nothing(contents: VolumeContents, what: str) -> DDPJobError:
    job, unlisted, others = contents.job, "; ".join(contents.unlisted[:3]), len(contents.others)
    writers = "only ddprun.checkpoints, ddprun.report and ddptrain write what is listed by step"
    return InvalidJobError(
        f"the volume of {job} holds {what}, in {contents.directory}",
        f"not listed: {unlisted}" if unlisted else writers,
        f"ddpjob pull {job} --all copies the other files ({others})" if others else f"ddpjob logs {job}",
    )


def _safe(path: Any) -> str:
    """Return a path below the directory it is copied to, and not hidden. Raises ``ValueError``: no image is trusted."""
    parts = PurePosixPath(path).parts
    is_hidden = any(part.startswith(".") and part != ".metadata" for part in parts)
    if not parts or path.startswith("/") or is_hidden or "\0" in path or "/".join(parts) != path:
        raise ValueError(path)
    path.encode()  # a lone surrogate is no name: UnicodeEncodeError is a ValueError
    if len(path) > _LONGEST_PATH:
        raise ValueError("too long")
    return str(path)


def _time(seconds: Any) -> str | None:
    return None if seconds is None else timestamp(datetime.fromtimestamp(seconds, UTC))
