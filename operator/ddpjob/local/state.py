"""What stays on disk of local jobs: readable from any shell while a job runs, and after.

jobs/<namespace>/<job>/lock            held by the one `ddpjob run` of this job, with its pid inside
jobs/<namespace>/<job>/cluster.json    the objects, as ``MemoryCluster.dump`` gives them
jobs/<namespace>/<job>/controller.log  what the controller logged in the last run
jobs/<namespace>/<job>/pods/<pod>/     <container>.log, <container>.termination-log, emptydir-<volume>/ ...
volumes/<namespace>/<claim>/           one directory per PersistentVolumeClaim; outlives the job, as a claim does
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddpjob.api import names
from ddpjob.cluster.base import Json
from ddpjob.local import lock
from ddpjob.local.errors import LocalError

_PLURALS = frozenset(r.plural for r in (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS, names.EVENTS))


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """``$DDPJOB_STATE_DIR``, else ``$XDG_STATE_HOME/ddpjob``, else ``~/.local/state/ddpjob``."""
    if given := environment.get("DDPJOB_STATE_DIR"):
        return Path(given).expanduser()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "ddpjob"


class JobFolder:
    """One job's part of the state folder. Nothing is made before something is written."""

    def __init__(self, path: Path, namespace: str, name: str) -> None:
        self.path = path
        self.namespace = namespace
        self.name = name

    def objects(self) -> Json | None:
        """What ``cluster.json`` holds, or None where there is none. Raises ``LocalError`` for a damaged file."""
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
                "it was written by another program, or the disk lost it; checkpoints lie elsewhere and are not touched",
                f"forget the job's state with `ddpjob delete {self.name}`, then run it again: it resumes",
            ) from error
        objects: Json = dumped
        return objects

    def job(self) -> Json | None:
        """The DDPJob as last recorded."""
        return next((job for job in self._of(names.DDPJOBS) if job["metadata"]["name"] == self.name), None)

    def pods(self) -> list[Json]:
        """Its pods as last recorded, those of earlier attempts included."""
        return self._of(names.PODS)

    def log(self, pod: str, container: str = names.TRAINER_CONTAINER) -> Path:
        """Where stdout and stderr of a container are kept; also after its pod object is gone."""
        return self.pod(pod) / f"{container}.log"

    def pod(self, pod: str) -> Path:
        """Everything of one pod."""
        return self.path / "pods" / pod

    def runner(self) -> int | None:
        """Pid of the live ``ddpjob run`` of this job, else None."""
        return lock.holder(self.path / "lock")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one that runs (or deletes) this job. Raises ``LocalError`` that names the process that is."""
        with lock.held(self.path / "lock", f"DDPJob {self.name}"):
            yield

    def save(self, dumped: Json) -> None:
        """Replace ``cluster.json`` at once: a reader, or a kill, never meets half of it."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / "cluster.json.tmp"
        temporary.write_text(json.dumps(dumped, separators=(",", ":")))
        temporary.replace(self.path / "cluster.json")

    def _of(self, resource: names.Resource) -> list[Json]:
        dumped = self.objects() or {"objects": []}
        return [obj for plural, obj in dumped["objects"] if plural == resource.plural]


def _check(dumped: Json) -> None:
    """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for what ``MemoryCluster.load`` could not take."""
    int(dumped["version"])
    list(dumped["namespaces"])
    for plural, obj in dumped["objects"]:
        if plural not in _PLURALS:
            raise ValueError(f"{plural} is no kind that this version knows")
        str(obj["metadata"]["namespace"] + obj["metadata"]["name"])


class StateFolder:
    """All jobs and volumes of one user. ``root``: None for the default place."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def job(self, namespace: str, name: str) -> JobFolder:
        """The folder of a job, whether it exists or not. The names must be Kubernetes names."""
        return JobFolder(self._inside("jobs", namespace, name), namespace, name)

    def jobs(self) -> list[JobFolder]:
        """All jobs with a record, sorted by namespace and name."""
        found = sorted((self.root / "jobs").glob("*/*/cluster.json"))
        return [JobFolder(path.parent, path.parent.parent.name, path.parent.name) for path in found]

    def volume(self, namespace: str, claim: str) -> Path:
        """The directory of a PersistentVolumeClaim, whether it exists or not."""
        return self._inside("volumes", namespace, claim)

    def _inside(self, kind: str, namespace: str, name: str) -> Path:
        for part in (namespace, name):
            if part in ("", ".", "..") or "/" in part or "\0" in part:
                raise LocalError(
                    f"{part!r} is no name of a Kubernetes object", next_step="use lower case letters, digits and '-'"
                )
        return self.root / kind / namespace / name
