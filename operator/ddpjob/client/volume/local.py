"""The volume of a job of this machine: a directory."""

import json
from collections.abc import Generator
from pathlib import Path

from ddpjob.client.volume import reader
from ddpjob.client.volume.contents import Place
from ddpjob.engine.desired import Job
from ddpjob.errors import DDPJobError, InvalidJobError
from ddpjob.local.state import HostPaths, JobFolder, StateFolder


class FolderReader:
    """Runs ``reader`` in this process; see ``VolumeReader``."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        if command == "list":
            return reader.listing(self._root, bool(arguments))
        return reader.send(self._root, json.loads(arguments[0]))


def local_place(record: JobFolder, folder: StateFolder) -> Place:
    """Return the directory of a job's checkpoints. Raises ``DDPJobError`` if it has none."""
    body = record.job()
    job = Job.of(body) if body is not None else None
    if job is None or job.spec.checkpoint is None:
        raise no_volume(record.name)
    volumes = {claim: Path(path) for claim, path in (record.place().get("volumes") or {}).items()}
    path = HostPaths(job, folder, volumes).checkpoints()
    if path is None or not path.is_dir():
        raise DDPJobError(
            f"the volume of {record.name} is gone: there is no directory {path}",
            "it was deleted or moved, or the job has never started",
            f"ddpjob get {record.name} shows whether it has run",
        )
    return Place(record.name, record.namespace, job.claim, str(path))


def no_volume(job: str) -> InvalidJobError:
    """Return the error about a job without ``checkpoint``."""
    return InvalidJobError(
        f"the job {job} has no volume",
        "spec.checkpoint names the claim or the claimTemplate for checkpoints and metrics",
        "add it to the job: docs/tasks/write-a-job.md; what its nodes printed is in its logs",
    )
