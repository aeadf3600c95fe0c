"""The jobs that a state folder of this machine has records of."""

import re
from collections.abc import Callable
from pathlib import Path

from ddpjob.client.base import INTERRUPTED, Jobs
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder, StateFolder

_LABEL = re.compile(r"\s*([\w./-]+)\s*==?\s*([\w.-]*)\s*")
_ACTIVE = ("Pending", "Running", "Ending", "Restarting")


class RecordedJobs:
    """The jobs of a namespace, or of all; of those that have not changed since the last reading, the same objects.

    Raises ``InvalidJobError`` for a selector of another form than ``team=a,stage=test``.
    """

    def __init__(self, folder: StateFolder, namespace: str | None, label_selector: str | None) -> None:
        self._folder, self._namespace, self._wanted = folder, namespace, _labels(label_selector or "")
        self._known: dict[Path, tuple[object, DDPJob]] = {}  # the version of each record

    def read(self, on_error: Callable[[DDPJobError], None] | None = None) -> Jobs:
        """Return the jobs. on_error: called for each damaged record, instead of raising its error."""
        self._folder.require_directory()
        found, known = [], self._known
        self._known = {}
        for record in self._folder.jobs():
            if self._namespace not in (None, record.namespace):
                continue
            try:
                found.append(self._job(record, known))
            except LocalError as error:
                if on_error is None:
                    raise
                on_error(error)
            except JobNotFoundError:  # deleted meanwhile
                continue
        return [job for job in found if (job.manifest["metadata"].get("labels") or {}).items() >= self._wanted]

    def _job(self, record: JobFolder, known: dict[Path, tuple[object, DDPJob]]) -> DDPJob:
        version = record.version()
        before, job = known.get(record.path, (None, None))
        if job is None or version != before:
            job = seen_job(record)
        elif not job.finished and (seen := seen_job(record)).state != job.state:  # its process was killed
            job = seen
        self._known[record.path] = version, job
        return job


def seen_job(record: JobFolder) -> DDPJob:
    """Return the recorded job. Raises ``JobNotFoundError`` if it was deleted meanwhile."""
    alone = record.runner() is None
    job = record.job()
    if job is None:
        raise JobNotFoundError(f"the job {record.name} was deleted", "another process deleted or replaced it")
    state = (job.get("status") or {}).get("state") or "Pending"
    # Nothing ran it before and after: a run that ended, or began, between the two looks is not an interruption.
    interrupted = alone and state in _ACTIVE and record.runner() is None
    return DDPJob.from_manifest(job, state=INTERRUPTED if interrupted else None)


def _labels(selector: str) -> set[tuple[str, str]]:
    """Return the labels of a selector such as ``team=a,stage=test``; an API server also takes other forms.

    Raises:
        InvalidJobError: it has another form.
    """
    labels: set[tuple[str, str]] = set()
    for part in selector.split(",") if selector.strip() else ():
        label = _LABEL.fullmatch(part)
        if label is None:
            raise InvalidJobError(
                f"{selector!r} selects no labels: {part.strip()!r} is not KEY=VALUE",
                "on this machine labels are compared by equality alone",
                "for example -l team=a,stage=test",
            )
        labels.add((label[1], label[2]))
    return labels
