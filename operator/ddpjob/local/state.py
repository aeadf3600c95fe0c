"""The state folder: files of local jobs, readable from any shell while a job runs and afterwards.

jobs/<namespace>/<job>/lock            locked by the `ddpjob run` of this job; contains its pid
jobs/<namespace>/<job>/cluster.json    the objects, as returned by ``MemoryCluster.dump``
jobs/<namespace>/<job>/controller.log  the log of the controller in the last run
jobs/<namespace>/<job>/pods/<pod>/     <container>.log, <container>.termination-log, emptydir-<volume>/ ...
volumes/<namespace>/<claim>/           one directory per PersistentVolumeClaim; kept when the job is deleted
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.desired import Job
from ddpjob.local import LocalError

_PROBE_SECONDS = 0.5  # ``lock_holder`` takes the lock, shared, for a moment
_PAUSE = 0.02
_PLURALS = frozenset(r.plural for r in (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS, names.EVENTS))


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``$DDPJOB_STATE_DIR``, else ``$XDG_STATE_HOME/ddpjob``, else ``~/.local/state/ddpjob``."""
    if given := environment.get("DDPJOB_STATE_DIR"):
        return Path(given).expanduser()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "ddpjob"


class JobFolder:
    """The folder of one job. It is created by the first write."""

    def __init__(self, path: Path, namespace: str, name: str) -> None:
        self.path = path
        self.namespace = namespace
        self.name = name

    def objects(self) -> Json | None:
        """Return the content of ``cluster.json``, or None. Raises ``LocalError`` for a damaged file."""
        path = self.path / "cluster.json"
        try:
            dumped = json.loads(path.read_bytes())
            _check(dumped)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(
                f"{path} cannot be read: {error.strerror}", next_step="check its owner and mode"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise LocalError(
                f"{path} is damaged: {error}",
                "another program wrote it, or the disk failed; checkpoints are stored elsewhere and are not affected",
                f"remove the record with `ddpjob delete {self.name}`, then run the job again: it resumes",
            ) from error
        objects: Json = dumped
        return objects

    def job(self) -> Json | None:
        """Return the recorded DDPJob."""
        return next((job for job in self._of(names.DDPJOBS) if job["metadata"]["name"] == self.name), None)

    def pods(self) -> list[Json]:
        """Return the recorded pods, those of earlier attempts included."""
        return self._of(names.PODS)

    def log(self, pod: str, container: str = names.TRAINER_CONTAINER) -> Path:
        """Return the log file of a container; it is kept when the pod is deleted."""
        return self.pod(pod) / f"{container}.log"

    def pod(self, pod: str) -> Path:
        """Everything of one pod."""
        return self.path / "pods" / pod

    def runner(self) -> int | None:
        """Return the pid of the ``ddpjob run`` that runs this job, or None."""
        return lock_holder(self.path / "lock")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the job to run or delete it. Raises ``LocalError`` with the pid of the process that holds the lock.

        The kernel releases an flock when its holder ends in any way; a pid file alone would remain after SIGKILL.
        """
        descriptor = _acquire(self.path / "lock", f"DDPJob {self.name}")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def save(self, dumped: Json) -> None:
        """Replace ``cluster.json`` atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / "cluster.json.tmp"
        temporary.write_text(json.dumps(dumped, separators=(",", ":")))
        temporary.replace(self.path / "cluster.json")

    def _of(self, resource: names.Resource) -> list[Json]:
        dumped = self.objects() or {"objects": []}
        return [obj for plural, obj in dumped["objects"] if plural == resource.plural]


def _check(dumped: Json) -> None:
    """Raise ``ValueError``, ``TypeError`` or ``KeyError`` for what ``MemoryCluster.load`` cannot read."""
    int(dumped["version"])
    list(dumped["namespaces"])
    for plural, obj in dumped["objects"]:
        if plural not in _PLURALS:
            raise ValueError(f"{plural} is not a kind that this version knows")
        str(obj["metadata"]["namespace"] + obj["metadata"]["name"])


class StateFolder:
    """All jobs and volumes of one user. root: None for ``default_root()``."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def job(self, namespace: str, name: str) -> JobFolder:
        """Return the folder of a job, whether it exists or not. The names must be Kubernetes names."""
        return JobFolder(self._inside("jobs", namespace, name), namespace, name)

    def jobs(self) -> list[JobFolder]:
        """Return all jobs with a record, sorted by namespace and name."""
        found = sorted((self.root / "jobs").glob("*/*/cluster.json"))
        return [JobFolder(path.parent, path.parent.parent.name, path.parent.name) for path in found]

    def volume(self, namespace: str, claim: str) -> Path:
        """Return the directory of a PersistentVolumeClaim, whether it exists or not."""
        return self._inside("volumes", namespace, claim)

    def _inside(self, kind: str, namespace: str, name: str) -> Path:
        for part in (namespace, name):
            if part in ("", ".", "..") or "/" in part or "\0" in part:
                raise LocalError(
                    f"{part!r} is not a Kubernetes name", next_step="use lower case letters, digits and '-'"
                )
        return self.root / kind / namespace / name


def remove_tree(path: Path, root: Path) -> None:
    """Remove a directory below ``root``; never follow a symbolic link.

    Raises:
        LocalError: a part of the path below ``root`` is a link, or something cannot be removed.
    """
    part = path
    while part != root:
        if part.is_symlink():
            raise LocalError(
                f"{part} is a symbolic link, so nothing was deleted",
                "only files in the state folder itself are deleted",
                f"remove the link yourself: rm {part}",
            )
        part = part.parent
    try:
        shutil.rmtree(path)  # which does not follow links
    except FileNotFoundError:
        return
    except OSError as error:
        raise LocalError(
            f"{error.filename or path} cannot be deleted: {error.strerror}",
            "it belongs to another user, or the disk is read-only",
            f"check it with ls -ld {error.filename or path}",
        ) from error


def lock_holder(path: Path) -> int | None:
    """Return the pid of the process that holds the lock at ``path``, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        deadline = time.monotonic() + _PROBE_SECONDS
        while not _try_lock(descriptor, shared=True):
            text = os.pread(descriptor, 32, 0).strip()
            if text.isdigit():
                return int(text)
            if time.monotonic() > deadline:
                return None  # locked by another prober, not by a run
            time.sleep(_PAUSE)  # the holder has just locked it and is about to write its pid
        return None
    finally:
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # specs and logs may be private
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor, shared=False):
            if _is_at(path, descriptor):
                return descriptor
        elif time.monotonic() > deadline:
            text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LocalError(
                f"{what} is running already, in process {text or 'unknown'}",
                "only one `ddpjob run` at a time can run a job",
                "watch it with `ddpjob get` and `ddpjob logs`, stop it with Ctrl-C there, or use another --name",
            )
        os.close(descriptor)
        time.sleep(_PAUSE)


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    import fcntl  # noqa: PLC0415 - missing on some systems, which then get a proper error

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the locked file is still at ``path``: it may have been deleted before it was locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class HostPaths:
    """Paths of one job. volumes: claim name to the directory that the user named for it."""

    job: Job
    folder: StateFolder
    volumes: Mapping[str, Path] = field(default_factory=dict)

    @property
    def record(self) -> JobFolder:
        """The job's folder in the state folder."""
        return self.folder.job(self.job.namespace, self.job.name)

    def claim(self, name: str) -> Path:
        """Return the directory that serves as a claim."""
        return self.volumes[name] if name in self.volumes else self.folder.volume(self.job.namespace, name)

    def checkpoints(self) -> Path | None:
        """Return the directory that the trainer sees as DDPJOB_CHECKPOINT_DIR; None without ``checkpoint``."""
        checkpoint = self.job.spec.checkpoint
        return self.claim(self.job.claim) / (checkpoint.sub_path or "") if checkpoint is not None else None

    def mounts(self) -> dict[str, Path]:
        """Return mount path to directory, for ``checkpoint`` and ``data``."""
        found: dict[str, Path] = {}
        checkpoint, data, directory = self.job.spec.checkpoint, self.job.spec.data, self.checkpoints()
        if checkpoint is not None and directory is not None:
            found[checkpoint.mount_path] = directory
        if data is not None:
            found[data.mount_path] = self.claim(data.claim_name)
        return found

    def on_host(self, path: str) -> Path:
        """Return where a path of the trainer is on this machine."""
        for mount, directory in self.mounts().items():
            if PurePosixPath(path).is_relative_to(mount):
                return directory / PurePosixPath(path).relative_to(mount)
        return Path(path)
