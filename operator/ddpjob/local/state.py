"""The state folder: files of local jobs, readable from any shell while a job runs and afterwards.

jobs/<namespace>/<job>/lock          locked by the `ddpjob run` of this job; contains its pid, and where that counts
jobs/<namespace>/<job>/job.json      the DDPJob and its pods, as an API server would store them
jobs/<namespace>/<job>/events.log    its events
jobs/<namespace>/<job>/ended.json    the error that ended the last run in the background; else blanks, which keep room
jobs/<namespace>/<job>/pods/<pod>/   trainer.log, trainer.termination-log, and while the pod runs its own volumes
volumes/<namespace>/<claim>/         one directory per PersistentVolumeClaim; kept when the job is deleted
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddpjob.local import LocalError, LocalJobExistsError

if TYPE_CHECKING:
    from ddpjob.engine.desired import Job  # what renders pods takes a tenth of the time of a command that reads

_PROBE_SECONDS = 0.5  # ``runner`` takes the lock, shared, for a moment
_PAUSE = 0.02
EVENTS = "events.log"
ENDED = "ended.json"
RECORD = "job.json"


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``$DDPJOB_STATE_DIR``, else ``$XDG_STATE_HOME/ddpjob``, else ``~/.local/state/ddpjob``."""
    if given := environment.get("DDPJOB_STATE_DIR"):
        return Path(given).expanduser()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "ddpjob"


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job. It is created by the first write."""

    path: Path
    namespace: str
    name: str

    def job(self) -> Json | None:
        """Return the recorded DDPJob, or None. Raises ``LocalError`` for a damaged record."""
        return next(iter(self._recorded()), None)

    def pods(self) -> list[Json]:
        """Return the recorded pods, those of earlier attempts included."""
        return self._recorded()[1:]

    def last_change(self) -> datetime:
        """Return when the record was written: the last sign of life of a run that was killed."""
        return datetime.fromtimestamp(self._record.stat().st_mtime, UTC)

    def log(self, pod: str) -> Path:
        """Return the log file of a pod; it is kept when the pod is deleted."""
        return self.pod(pod) / f"{names.TRAINER_CONTAINER}.log"

    def pod(self, pod: str) -> Path:
        """Everything of one pod."""
        return self.path / "pods" / pod

    def runner(self) -> int | None:
        """Return the pid of the ``ddpjob run`` that runs this job, or None."""
        pid = next(iter(self._runner()), "")
        return int(pid) if pid.isdecimal() else None

    def runs_elsewhere(self) -> bool:
        """Return whether the runner's pid is one of another machine or container, which shares this folder."""
        return self._runner()[1:] not in ([], [_pid_space()])

    def _runner(self) -> list[str]:
        """Return the words of the lock file, if the file is locked."""
        try:
            with self._lock.open() as file:
                return [] if _try_lock(file, exclusive=False) else file.read().split()
        except (OSError, ValueError):
            return []

    @contextmanager
    def locked(self, *, to_run: bool = True) -> Iterator[None]:
        """Lock the job to run it, or to delete it: then this process must not be taken for one to stop.

        Raises ``LocalError`` with the pid of the process that holds the lock.
        The kernel releases an flock when its holder ends in any way; a pid file alone would remain after SIGKILL.
        """
        deadline = time.monotonic() + _PROBE_SECONDS
        while True:
            make_private(self.path)  # specs and logs may be private
            with self._lock.open("a+") as file:
                if _try_lock(file, exclusive=True) and _is_at(self._lock, file):
                    file.truncate(0)
                    if to_run:
                        os.write(file.fileno(), f"{os.getpid()} {_pid_space()}\n".encode())
                    try:
                        yield
                    finally:
                        file.truncate(0)
                    return
                holder = self.runner()
            if time.monotonic() > deadline:
                raise LocalJobExistsError(
                    f"DDPJob {self.name} is running already, in process {holder}"
                    if holder
                    else f"another command is starting or deleting DDPJob {self.name}",
                    "only one `ddpjob run` at a time can run a job",
                    "watch it with `ddpjob get` and `ddpjob logs`, stop it with Ctrl-C there, or use another --name",
                )
            time.sleep(_PAUSE)

    def version(self) -> tuple[int, int] | None:
        """Return what differs after each change of the record; None if there is no record."""
        try:
            found = self._record.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def ended(self) -> list[str]:
        """Return error, hint and next step with which the last run in the background ended, if it ended by an error."""
        try:
            path = self.path / ENDED
            if path.stat().st_mtime < self._record.stat().st_mtime:  # a later run, in the foreground
                return []
            error, hint, next_step = json.loads(path.read_bytes())
            return [str(error), str(hint), str(next_step)]
        except (OSError, ValueError, TypeError):
            return []

    def place(self) -> Json:
        """Return where the last run ran the job (``Machine.place``); {} if there is no record, or it does not say."""
        try:
            found = json.loads(self._record.read_bytes()).get("place")
        except (OSError, ValueError, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}

    def save(self, job: Json, pods: Iterable[Json], place: Json) -> None:
        """Replace the record atomically."""
        make_private(self.path)
        temporary = self._record.with_suffix(".json.tmp")
        temporary.write_text(json.dumps({"job": job, "pods": list(pods), "place": place}, separators=(",", ":")))
        temporary.replace(self._record)

    def forget(self) -> None:
        """Remove the record, the events and the logs."""
        self._record.unlink(missing_ok=True)
        (self.path / EVENTS).unlink(missing_ok=True)
        remove_tree(self.path / "pods", self.path)

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @property
    def _record(self) -> Path:
        return self.path / RECORD

    def _recorded(self) -> list[Json]:
        """Return the recorded DDPJob and its pods; [] without a record."""
        try:
            record = json.loads(self._record.read_bytes())
            found = [record["job"], *record["pods"]]
            for obj in found:  # what every reader takes for granted
                "".join(obj["metadata"][name] for name in ("namespace", "name", "uid"))
                dict(obj["spec"])
                is_true(obj.get("status"), "Finished")
            return found
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LocalError(
                f"{self._record} cannot be read: {error.strerror}", next_step="check its owner and mode"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LocalError(
                f"{self._record} is damaged: {error}",
                "another program wrote it, or the disk failed; checkpoints are stored elsewhere and are not affected",
                f"remove the record with `ddpjob delete {self.name}`, then run the job again: it resumes",
            ) from error


class StateFolder:
    """All jobs and volumes of one user. root: None for ``default_root()``."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def require_directory(self) -> None:
        """Raise ``LocalError`` if the root is a file, in which no job is found."""
        if self.root.exists() and not self.root.is_dir():
            raise LocalError(
                f"{self.root} is a file, and the state folder is a directory",
                "it holds the jobs of this machine and their volumes",
                "name another one with DDPJOB_STATE_DIR",
            )

    def job(self, namespace: str, name: str) -> JobFolder:
        """Return the folder of a job, whether it exists or not. The names must be Kubernetes names."""
        return JobFolder(self._inside("jobs", namespace, name), namespace, name)

    def jobs(self) -> list[JobFolder]:
        """Return all jobs with a record, sorted by namespace and name."""
        found = sorted((self.root / "jobs").glob(f"*/*/{RECORD}"))
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


def make_private(path: Path) -> None:
    """Create a directory and those above it that do not exist, for this user alone."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` of the block as the ``LocalError`` of ``unusable``."""
    try:
        yield
    except OSError as error:
        raise unusable(error, path) from error


def unusable(error: OSError, path: Path) -> LocalError:
    """Return the error of a state folder or volume that cannot be used. path: of the folder."""
    return LocalError(
        f"{error.filename or path}: {error.strerror or error}",
        "local mode keeps its state and the job's volumes there",
        "free space or fix the permissions, or name another folder with DDPJOB_STATE_DIR",
    )


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


def _pid_space() -> str:
    """Return what differs between machines and between containers whose processes have numbers of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return "unknown"


def _try_lock(file: TextIO, *, exclusive: bool) -> bool:
    import fcntl  # noqa: PLC0415 - missing on some systems, which then get a proper error

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: TextIO) -> bool:
    """Return whether the locked file is still at ``path``: it may have been deleted before it was locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class HostPaths:
    """Paths of one job. volumes: claim name to the directory that the user named for it."""

    job: "Job"
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

    def metrics(self) -> Path | None:
        """Return the folder of metrics that the trainer wrote beside its checkpoints; None if there is none."""
        directory = self.checkpoints()
        return directory / "metrics" if directory and (directory / "metrics").exists() else None
