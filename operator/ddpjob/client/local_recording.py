"""What of a job of this machine is read for a bundle."""

import contextlib
import getpass
import importlib.metadata
import platform
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ddpjob.api.log_failure import SEARCHED_BYTES, LogFailure, log_failure
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.client.bundle.recording import ASSUMED, Recording, Unread
from ddpjob.client.local_logs import last_lines
from ddpjob.engine.desired import Job
from ddpjob.local.admission import SETTINGS
from ddpjob.local.state import HostPaths, JobFolder, StateFolder
from ddpjob.version import __version__

_LOG_LINES = 500
_METRICS_BYTES = 8 * 2**20
"""Of all files of metrics; of the newest, their ends."""


def read_recording(folder: StateFolder, record: JobFolder, job: Json, *, logs: bool) -> Recording:
    """Return what is recorded of a job. logs: with the ends of the logs of its pods."""
    pods = record.pods()
    unread: list[Unread] = []
    texts = {"events.log": _text(record.path / "events.log")}
    if logs:
        texts |= {f"logs/{name}.log": _end(record, name) for name in _names(pods)}
    texts |= _metrics(folder, record, job, unread)
    return Recording(
        job=job,
        now=datetime.now(UTC),
        place="machine",
        settings=SETTINGS,
        round="complete",
        pods=pods,
        assumed=ASSUMED,  # one machine needs none of them
        logs={str(pod["metadata"]["uid"]): _failure(record, pod) for pod in pods},
        texts={path: text for path, text in texts.items() if text},
        versions=versions(),
        unread=unread,
        names=(*_user(), socket.gethostname()),
    )


def versions() -> dict[str, str]:
    """Return the versions of what jobs of this machine run."""
    found = {"ddpjob": __version__, "python": platform.python_version(), "system": platform.platform(terse=True)}
    try:
        return found | {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return found


def _user() -> Iterator[str]:
    """Yield the name of the user. In a container the uid may have none, and as a name it would hide other numbers."""
    with contextlib.suppress(KeyError, OSError):  # OSError: since Python 3.13
        yield getpass.getuser()


def _failure(record: JobFolder, pod: Json) -> LogFailure | None:
    """Return what the log of a failed pod says, as local mode reads it."""
    if not pod_view(pod).exit_code:
        return None
    return log_failure(_end(record, str(pod["metadata"]["name"]))[-SEARCHED_BYTES:])


def _end(record: JobFolder, pod: str) -> str:
    return "".join(f"{line}\n" for line in last_lines(record.log(pod), _LOG_LINES))


def _names(pods: list[Json]) -> Iterator[str]:
    return (str(pod["metadata"]["name"]) for pod in pods)


def _metrics(folder: StateFolder, record: JobFolder, job: Json, unread: list[Unread]) -> dict[str, str]:
    """Return the metrics that the trainer wrote into its checkpoint directory."""
    volumes = {name: Path(path) for name, path in (record.place().get("volumes") or {}).items()}
    try:
        directory = HostPaths(Job.of(job), folder, volumes).checkpoints()
    except ValidationError:
        directory = None
    if directory is None:
        unread.append(Unread(what="metrics", reason="the job has no volume for checkpoints"))
        return {}
    found: dict[str, str] = {}
    left = _METRICS_BYTES
    of_runs = directory / "metrics"
    files = [] if of_runs.is_symlink() else sorted(of_runs.glob("*.jsonl"), reverse=True)
    for path in files:
        if path.is_symlink() or not path.is_file() or left <= 0:
            continue  # the program may link to any file of the user
        text = _text(path)[-left:]
        left -= len(text)
        found[f"metrics/{path.name}"] = text
    if not found:
        unread.append(Unread(what="metrics", reason="the trainer wrote none"))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
