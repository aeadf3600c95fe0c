"""What the volume of a job holds (``VolumeContents``), what of it is wanted, and what ``pull`` has copied.

The JSON of ``VolumeContents`` is that of ``ddpjob checkpoints -o json``, the JSON of ``Pulled`` that of
``ddpjob pull -o json``.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.volume.messages import not_of_reader
from ddpjob.client.volume.reader import MOST_FILES
from ddpjob.errors import DamagedFileError, DDPJobError, InvalidJobError

_METRICS = re.compile(r"(?:^|/)metrics(?:/run-\d{6,})?\.jsonl$")
_LOG = re.compile(r"\.log$")
RECORD = ".ddpjob-pulled"
"""In a directory with copies: their digests, one JSON object a line."""
_OWN = re.compile(rf"(?:^|/)(?:{re.escape(RECORD)}|[^/]*\.ddpjob-part)(?:/|$)")
_HIDDEN = re.compile(r"(?:^|/)\.")
_LONGEST_PATH, _LONGEST_MANIFEST = 4096, 16_384  # characters


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
    logs: list[VolumeFile]
    """Files whose name ends with .log."""
    others: list[VolumeFile]
    """All other files: also checkpoints in a form of the script's own."""
    complete: bool
    """False if the volume has more files than are listed."""
    unreadable: list[str]
    """Folders that could not be read, with the reason."""


class PulledFile(WireModel):
    """One file that ``pull`` was asked for."""

    path: str
    """Path in the volume, and below the directory it was copied to."""
    bytes: int
    """Its size."""
    sha256: str
    """Digest of its content, which is the same on the volume and here."""
    outcome: Literal["Copied", "Resumed", "Unchanged"]
    """Resumed: a part was here from an earlier pull. Unchanged: it was here already."""
    problem: str | None = None
    """What is wrong with it on the volume."""


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
    hidden: int = 0
    """With all files asked for: how many were left out, because a name in their path begins with a dot."""

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


@dataclass(frozen=True)
class Wanted:
    """One file to copy. sha256: its digest by its manifest. is_chosen: a content without this digest is an error."""

    path: str
    bytes: int
    modified: str
    inode: int
    sha256: str | None = None
    is_chosen: bool = False


@dataclass(frozen=True)
class Place:
    """Whose volume it is: the fields of the same name of ``VolumeContents``."""

    job: str
    namespace: str
    claim: str
    directory: str


@dataclass(frozen=True)
class Listing:
    """What a volume holds, and by path all its files and their inodes."""

    contents: VolumeContents
    files: dict[str, VolumeFile]
    inodes: dict[str, int]

    def wanted(self, path: str, sha256: str | None = None, *, is_chosen: bool = False) -> Wanted:
        """Return a file as it was listed, to be copied."""
        file = self.files[path]
        return Wanted(path, file.bytes, file.modified, self.inodes[path], sha256, is_chosen)


def listing(place: Place, found: Iterable[Json | bytes]) -> Listing:
    """Return what a volume holds, from the messages of ``list``.

    Raises:
        CutError: they ended early.
        UnavailableError: they are wrong.
    """
    files: dict[str, VolumeFile] = {}
    inodes: dict[str, int] = {}
    checkpoints: list[CheckpointFile] = []
    end: Json = {}
    for message in found:
        try:
            match message:
                case {"file": _} | {"checkpoint": _} if max(len(files), len(checkpoints)) >= MOST_FILES:
                    raise ValueError("too many")
                case {"file": {"path": path, "bytes": size, "modified": modified, "inode": int(inode)}}:
                    files[path] = VolumeFile.model_validate(
                        {"path": _safe(path), "bytes": size, "modified": _time(modified)}
                    )
                    if not 0 <= inode < 2**64:
                        raise ValueError(inode)
                    inodes[path] = inode
                case {"checkpoint": {"path": path, **fields}}:
                    checkpoints.append(_checkpoint(_safe(path), fields))
                case {"end": end}:
                    pass
        except (ValueError, TypeError, OverflowError, OSError) as error:  # of pydantic, too
            raise not_of_reader(message) from error
    # A training that goes on may have deleted the file since the manifest was read.
    checkpoints = [found for found in checkpoints if found.problem or all(path in files for path in _pair(found))]
    checkpoints.sort(key=lambda checkpoint: (-checkpoint.run, -checkpoint.step, checkpoint.path))
    of_checkpoints = {path for checkpoint in checkpoints for path in _pair(checkpoint)}
    rest = [file for path, file in files.items() if path not in of_checkpoints]
    made = VolumeContents(
        **place.__dict__,
        checkpoints=checkpoints,
        metrics=[file for file in rest if _METRICS.search(file.path)],
        logs=[file for file in rest if _LOG.search(file.path)],
        others=[file for file in rest if not (_METRICS.search(file.path) or _LOG.search(file.path))],
        complete=bool(end.get("complete")),
        unreadable=[str(text) for text in end.get("unreadable") or ()],
    )
    return Listing(made, files, inodes)


def _checkpoint(path: str, fields: Mapping[Any, Any]) -> CheckpointFile:
    """Return a checkpoint; it is unreadable if its manifest holds values that none has. Raises ``ValueError``."""
    known = {key: value for key, value in fields.items() if key != "manifest" and value != ""} | {"path": path}
    try:
        if len(str(known)) > _LONGEST_MANIFEST:
            raise ValueError("too long")
        return CheckpointFile.model_validate(known | {"saved": _time(fields.get("saved"))})
    except (ValueError, TypeError, OverflowError, OSError):
        name = {key: fields.get(key) for key in ("run", "step")} | {"path": path, "state": "Unreadable"}
        return CheckpointFile.model_validate(name | {"problem": "its manifest holds a value that is not valid"})


@dataclass(frozen=True)
class Choice:
    """What to copy: the arguments of ``Client.pull``; without any, the newest checkpoint."""

    steps: Collection[int] = ()
    metrics: bool = False
    everything: bool = False
    hidden: bool = False

    def leaves_out(self, path: str) -> bool:
        """Return whether a file is hidden and not asked for: it may hold commands for git, a shell or an editor."""
        return bool(_OWN.search(path) or (not self.hidden and _HIDDEN.search(path)))


def wanted_files(found: Listing, choice: Choice) -> list[Wanted]:
    """Return the files to copy.

    The file of a checkpoint comes before its manifest: a checkpoint exists once its manifest does.

    Raises:
        InvalidJobError: there is nothing of the kind.
        DamagedFileError: a checkpoint that was asked for is damaged.
    """
    lists = {kind: getattr(found.contents, kind) for kind in ("checkpoints", "metrics", "logs", "others")}
    shown = {kind: [file for file in files if not choice.leaves_out(file.path)] for kind, files in lists.items()}
    volume = found.contents.model_copy(update=shown)
    if choice.everything:
        rest = [*volume.metrics, *volume.logs, *volume.others]
        paths = [path for checkpoint in reversed(volume.checkpoints) for path in _pair(checkpoint)]
        digests = {checkpoint.path: checkpoint.sha256 for checkpoint in volume.checkpoints}
        wanted = [*(file.path for file in rest), *(path for path in paths if path in found.files)]
        if not wanted:
            raise _nothing(volume, "hidden files alone, which --hidden copies" if found.files else "no files")
        return [found.wanted(path, digests.get(path)) for path in wanted]
    chosen: list[Wanted] = []
    for checkpoint in _chosen(volume, choice.steps) if choice.steps or not choice.metrics else ():
        for path in _pair(checkpoint):
            digest = checkpoint.sha256 if path == checkpoint.path else None
            chosen.append(found.wanted(path, digest, is_chosen=True))
    if choice.metrics:
        if not volume.metrics:
            raise _nothing(volume, "no metrics")
        chosen += [found.wanted(file.path) for file in volume.metrics]
    return chosen


def _chosen(volume: VolumeContents, steps: Collection[int]) -> Iterator[CheckpointFile]:
    usable = [found for found in volume.checkpoints if found.problem is None]
    if not steps:
        if not usable:
            raise _nothing(volume, "no checkpoint")
        yield usable[0]
    for step in sorted(set(steps)):
        of_step = [found for found in volume.checkpoints if found.step == step]
        if not of_step:
            known = ", ".join(str(found.step) for found in volume.checkpoints[:10]) or "none"
            raise InvalidJobError(
                f"the volume of {volume.job} holds no checkpoint of step {step}",
                f"there are checkpoints of the steps {known}; older ones are deleted by the training",
                f"ddpjob checkpoints {volume.job}",
            )
        best = next((found for found in of_step if found.problem is None), of_step[0])
        if best.problem is not None:
            raise damaged(volume.job, best.path, best.problem)
        yield best


def damaged(job: str, path: str, problem: str) -> DamagedFileError:
    """Return the error about a checkpoint that was asked for."""
    return DamagedFileError(
        f"{path} on the volume of {job} is damaged: {problem}",
        "the volume failed, or another program wrote into the file; a training resumes from an older checkpoint",
        f"ddpjob checkpoints {job} shows which are intact; ddpjob pull {job} --step N copies one of them",
    )


def _nothing(volume: VolumeContents, what: str) -> DDPJobError:
    unreadable = "; ".join(volume.unreadable[:3])
    others = len(volume.logs) + len(volume.others)
    return InvalidJobError(
        f"the volume of {volume.job} holds {what}, in {volume.directory}",
        f"could not read {unreadable}"
        if unreadable
        else "only ddprun.checkpoints, ddprun.report and ddptrain write what is listed by step",
        f"ddpjob pull {volume.job} --all copies the other files ({others})" if others else f"ddpjob logs {volume.job}",
    )


def _pair(checkpoint: CheckpointFile) -> tuple[str, str]:
    """Return the paths of a checkpoint's file and manifest."""
    return checkpoint.path, checkpoint.path.removesuffix(".pt") + ".json"


def _safe(path: Any) -> str:
    """Return a path that stays below the directory it is copied to. Raises ``ValueError``: the image is not trusted."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or "/".join(parts) != path:
        raise ValueError(path)
    path.encode()  # a lone surrogate is no name: UnicodeEncodeError is a ValueError
    if len(path) > _LONGEST_PATH:
        raise ValueError("too long")
    return str(path)


def _time(seconds: Any) -> str | None:
    return None if seconds is None else timestamp(datetime.fromtimestamp(seconds, UTC))
