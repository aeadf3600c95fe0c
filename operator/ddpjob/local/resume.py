"""The start of a run: resume the job that the state folder holds, or replace it with a new one."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime

from ddpjob.api.objects import Json, is_true
from ddpjob.api.spec import forbidden_changes
from ddpjob.engine.observed import Observed
from ddpjob.engine.plan import plan
from ddpjob.local.admission import SETTINGS, AdmittedJob
from ddpjob.local.pod_process import PRIVATE
from ddpjob.local.state import HostPaths, JobFolder, remove_tree

Say = Callable[[str], None]
_PLANS = 10  # to end an attempt takes two


def start_or_resume(folder: JobFolder, wanted: AdmittedJob, say: Say) -> Json:
    """Return the DDPJob to run: the recorded job if it can be resumed, otherwise ``wanted``."""
    old = folder.job()
    if old is not None and not is_true(old.get("status"), "Finished"):
        # Both specs are as stored, defaults included.
        if not forbidden_changes(old["spec"], wanted.body["spec"]):
            return _resumed(folder, old, wanted)
        say(f"the spec of {folder.name} has changed: a new job replaces it and resumes from its checkpoints")
    elif old is not None:
        say(f"{folder.name} finished before: a new job replaces it and keeps its checkpoints (--fresh removes them)")
    folder.forget()
    return wanted.body


def _resumed(folder: JobFolder, old: Json, wanted: AdmittedJob) -> Json:
    """Return the recorded job with the wanted spec. No process of an earlier run is left.

    If that run was killed, its attempt is ended by a suspension as of its last sign of life: this spends no restart,
    and the time without a run does not count towards any deadline.
    """
    for path in folder.path.glob(f"pods/*/{PRIVATE}"):
        shutil.rmtree(path, ignore_errors=True)
    last = min(folder.last_change(), datetime.now(UTC))
    job = changed(old, wanted.body["spec"] | {"suspend": True})
    for _ in range(_PLANS):
        if (status := plan(job, Observed(live=True), last, SETTINGS).status) is None:
            break
        job = job | {"status": status}
    return changed(job, wanted.body["spec"])


def changed(job: Json, spec: Json) -> Json:
    """Return the job with another spec, as after ``kubectl apply``."""
    meta = job["metadata"]
    return job | {"spec": spec, "metadata": meta | {"generation": meta.get("generation", 1) + (spec != job["spec"])}}


def remove_state(wanted: AdmittedJob, paths: HostPaths, say: Say) -> None:
    """Remove the job's record, its logs, and the checkpoints on its own claim: ``--fresh``."""
    paths.record.forget()
    claim = wanted.own_claim or ""
    if given := paths.volumes.get(claim):
        say(f"--fresh does not empty {given}: you named it with --volume; empty it yourself if you want to")
    elif claim:
        remove_tree(paths.claim(claim), paths.folder.root)
