"""What is read of a job of this machine: its record, the ends of its logs, and for a bundle the metrics."""

import importlib.metadata
import platform
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ddpjob.api.objects import Json
from ddpjob.client.job import DDPJob
from ddpjob.client.local_logs import last_lines
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.timeline import local_events
from ddpjob.engine.desired import Job
from ddpjob.local.admission import SETTINGS
from ddpjob.local.state import EVENTS, HostPaths, JobFolder, StateFolder
from ddpjob.version import __version__

_LOG_LINES = 500
_METRICS_BYTES = 8 * 2**20
"""Of all files of metrics; of the newest, their ends."""
_RUN = re.compile(r"run-([0-9]{1,9})\.jsonl")
"""Of a file of metrics. A file of another name is not from the trainer, and its name may be a value of the user."""


def read_record(record: JobFolder, job: Json, *, is_run: bool = True) -> Snapshot:
    """Return what the record of a job says. is_run: a process runs it, or it has finished."""
    return Snapshot(
        job=job,
        now=datetime.now(UTC),
        settings=SETTINGS,
        pods=record.pods(),
        events=local_events(DDPJob.from_manifest(job), _text(record.path / EVENTS).splitlines()),
        is_run=is_run,
        ended=record.ended() or (),
    )


def read_all(folder: StateFolder, record: JobFolder, job: Json, *, is_run: bool, logs: bool) -> Snapshot:
    """Return the record of a job with its metrics and versions. logs: with the ends of the logs of its pods."""
    found = read_record(record, job, is_run=is_run)
    pods = [str(pod["metadata"]["name"]) for pod in found.pods or ()] if logs else ()
    texts, unread = _metrics(folder, record, job)
    ends = {pod: end for pod in pods if (end := end_of_log(record, pod))}
    return replace(found, logs=ends, texts=texts, versions=_versions(), unread=unread)


def end_of_log(record: JobFolder, pod: str) -> str:
    """Return the last lines of the log of a pod."""
    return "\n".join(last_lines(record.log(pod), _LOG_LINES))


def checkpoints_of(folder: StateFolder, record: JobFolder, job: Json) -> Path | None:
    """Return the directory of the checkpoints of a job, where its last run had it; None if it has no volume."""
    volumes = {claim: Path(path) for claim, path in (record.place().get("volumes") or {}).items()}
    return HostPaths(Job.of(job), folder, volumes).checkpoints()


def _versions() -> dict[str, str]:
    """Return the versions of what jobs of this machine run."""
    found = {"ddpjob": __version__, "python": platform.python_version(), "system": platform.platform(terse=True)}
    try:
        return found | {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return found


def _metrics(folder: StateFolder, record: JobFolder, job: Json) -> tuple[dict[str, str], dict[str, str]]:
    """Return the metrics that the trainer wrote into its checkpoint directory, or why there are none."""
    try:
        directory = checkpoints_of(folder, record, job)
    except ValidationError:
        directory = None
    if directory is None:
        return {}, {"metrics": "the job has no volume for checkpoints"}
    found: dict[str, str] = {}
    left = _METRICS_BYTES
    of_runs = directory / "metrics"
    files = [] if of_runs.is_symlink() else [path for path in of_runs.glob("run-*.jsonl") if _RUN.fullmatch(path.name)]
    for path in sorted(files, key=lambda path: int(_RUN.sub(r"\1", path.name)), reverse=True):
        if path.is_symlink() or not path.is_file() or left <= 0:
            continue  # the program may link to any file of the user
        text = _text(path, left)
        left -= len(text)
        found[f"metrics/{path.name}"] = text
    return found, {} if found else {"metrics": "the trainer wrote none"}


def _text(path: Path, most: int | None = None) -> str:
    """Return the text of a file, or its last bytes; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            if most is not None:
                file.seek(max(0, path.stat().st_size - most))
            return file.read(-1 if most is None else most).decode(errors="replace")
    except OSError:
        return ""
