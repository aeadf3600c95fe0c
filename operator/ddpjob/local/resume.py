"""The start of a run: resume the job that the state folder holds, or replace it with a new one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddpjob.api.spec import forbidden_changes
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.engine.actions import status_patch
from ddpjob.local.admission import AdmittedJob
from ddpjob.local.kubelet import ENTRYPOINT, is_over
from ddpjob.local.state import JobFolder, StateFolder, remove_tree
from ddpjob.local.volumes import remove_private_volumes

Say = Callable[[str], None]


@dataclass(frozen=True)
class ResumeState:
    """How the session begins.

    suspend: ``spec.suspend`` of the user's file.
    killed_at: the last sign of life of a run that was killed, or None. The session first suspends the job as of that
        time, so that the time without a run does not count towards any deadline.
    """

    suspend: bool
    killed_at: datetime | None = None


def start_or_resume(cluster: MemoryCluster, folder: JobFolder, wanted: AdmittedJob, say: Say) -> ResumeState:
    """Load the job into ``cluster``: the recorded one if it can be resumed, otherwise ``wanted``."""
    dumped = folder.objects()
    old = folder.job() if dumped else None
    if dumped is None or old is None:
        _load_new(cluster, folder, wanted, {"version": 1, "namespaces": [], "objects": []})
        return ResumeState(wanted.job.spec.suspend)
    is_finished = is_true(old.get("status"), "Finished")
    if not is_finished and _can_resume(old, wanted):
        cluster.load(dumped)
        return _resume(cluster, folder, old, wanted, say)
    if is_finished:
        say(f"{folder.name} finished before: a new job replaces it and keeps its checkpoints (--fresh removes them)")
    else:
        say(f"the spec of {folder.name} has changed: a new job replaces it and resumes from its checkpoints")
    # As after `kubectl delete` and `kubectl apply`: pods and events go, claims without an owner stay.
    claims = [[plural, obj] for plural, obj in dumped["objects"] if plural == names.CLAIMS.plural]
    kept = [entry for entry in claims if not entry[1]["metadata"].get("ownerReferences")]
    _load_new(cluster, folder, wanted, dumped | {"objects": kept})
    return ResumeState(wanted.job.spec.suspend)


def remove_state(
    folder: JobFolder, state: StateFolder, wanted: AdmittedJob, volumes: Mapping[str, Path], say: Say
) -> None:
    """Remove the job's record, its logs, and the checkpoints on its own claim: ``--fresh``."""
    (folder.path / "cluster.json").unlink(missing_ok=True)
    remove_tree(folder.path / "pods", folder.path)
    claim = wanted.own_claim
    if claim is None:
        return
    if claim in volumes:
        say(f"--fresh does not empty {volumes[claim]}: you named it with --volume; empty it yourself if you want to")
    else:
        remove_tree(state.volume(folder.namespace, claim), state.root)


def explain_differences(wanted: AdmittedJob, folder: StateFolder, volumes: Mapping[str, Path], say: Say) -> None:
    """Say what differs from a cluster, and which directories serve as claims that the job did not create."""
    say(
        "local mode: images, resource limits, security contexts, probes, placement and network policies are not "
        "enforced, and mount paths are translated into directories of this machine"
    )
    if not wanted.command:
        say(f"the job has no command: running `{ENTRYPOINT}`, the entrypoint of this project's image")
    for claim in wanted.claims:
        if claim != wanted.own_claim and claim not in volumes:
            directory = folder.volume(wanted.job.namespace, claim)
            say(f"claim {claim} is {directory}; use another directory with --volume {claim}=DIR")


def resumed(job: Json) -> str:
    """Return the line that reports a resumption."""
    return f"Resumed: attempt {job['status']['attempt'] + 1} begins"


def _load_new(cluster: MemoryCluster, folder: JobFolder, wanted: AdmittedJob, kept: Json) -> None:
    """Load the admitted job and the kept objects. The job is not created again: it has passed admission."""
    remove_tree(folder.path / "pods", folder.path)
    version = int(kept["version"]) + 1
    body = wanted.body | {"metadata": wanted.body["metadata"] | {"resourceVersion": str(version)}}
    objects = [*kept["objects"], [names.DDPJOBS.plural, body]]
    cluster.load({"version": version, "namespaces": [*kept["namespaces"], folder.namespace], "objects": objects})


def _can_resume(old: Json, wanted: AdmittedJob) -> bool:
    """Return whether an apply could turn one into the other: no immutable field, template included, differs.

    Both specs are as stored, defaults included: a job of another release with other defaults is replaced.
    """
    return not forbidden_changes(old["spec"], wanted.body["spec"])


def _resume(cluster: MemoryCluster, folder: JobFolder, old: Json, wanted: AdmittedJob, say: Say) -> ResumeState:
    suspend = wanted.job.spec.suspend
    is_suspended = is_true(old.get("status"), "Suspended")
    settled = is_suspended or not (old.get("status") or {}).get("attempt")
    # No process of an earlier run is left, so pods that are recorded as running are gone.
    for pod in folder.pods():
        if not is_over(pod):
            name = pod["metadata"]["name"]
            remove_private_volumes(folder.pod(name))
            cluster.server.delete(names.PODS, folder.namespace, name, grace_seconds=0)
    change = status_patch(old["spec"], wanted.body["spec"]) | {"suspend": suspend if settled else True}
    cluster.server.patch(names.DDPJOBS, folder.namespace, folder.name, {"spec": change})
    if settled:
        if not suspend and is_suspended:
            say(resumed(old))
        return ResumeState(suspend)
    last = datetime.fromtimestamp((folder.path / "cluster.json").stat().st_mtime, UTC)
    return ResumeState(suspend, min(last, datetime.now(UTC)))
