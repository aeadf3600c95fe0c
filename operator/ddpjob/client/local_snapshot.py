"""What is read of a job of this machine: its record, and the ends of its logs."""

import importlib.metadata
import platform
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

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


def read_record(record: JobFolder, job: Json, *, is_run: bool = True) -> Snapshot:
    """Return what the record of a job says. is_run: a process runs it, or it has finished."""
    return Snapshot(
        job=job,
        now=datetime.now(UTC),
        settings=SETTINGS,
        pods=record.pods(),
        events=local_events(DDPJob.from_manifest(job), _lines(record.path / EVENTS)),
        is_run=is_run,
        ended=record.ended() or (),
    )


def read_all(record: JobFolder, job: Json, *, is_run: bool, logs: bool) -> Snapshot:
    """Return the record of a job, and versions of programs. logs: with the ends of the logs of its pods."""
    found = read_record(record, job, is_run=is_run)
    pods = [str(pod["metadata"]["name"]) for pod in found.pods or ()] if logs else ()
    ends = {pod: end for pod in pods if (end := end_of_log(record, pod))}
    return replace(found, logs=ends, versions=_versions())


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


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
