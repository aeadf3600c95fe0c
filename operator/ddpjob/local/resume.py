"""How a run begins: what is known of the job from before, and whether that is resumed or replaced."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.spec import parse_spec
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.engine.actions import EngineSettings, status_patch
from ddpjob.engine.desired import desired_pods, spec_hash
from ddpjob.local.admission import job_of
from ddpjob.local.errors import LocalError
from ddpjob.local.kubelet import ENTRYPOINT, is_over
from ddpjob.local.state import JobFolder, StateFolder
from ddpjob.local.volumes import remove_own

Say = Callable[[str], None]


@dataclass(frozen=True)
class ResumeState:
    """What the session has to go on with.

    suspend: what the user's file says of it.
    dated: the last sign of life of a run that was killed; the job must first be suspended as of then, so that the
        time without a runner counts against no deadline. None where there was no such run.
    """

    suspend: bool
    dated: datetime | None = None


def is_true(job: Json, condition: str) -> bool:
    """Whether the job's status says so."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def prepare(cluster: MemoryCluster, folder: JobFolder, wanted: Json, say: Say) -> ResumeState:
    """Put the job into ``cluster``: the one that was begun, or a new one in its place."""
    cluster.create_namespace(folder.namespace)
    suspend = bool(wanted["spec"].get("suspend"))
    dumped = folder.objects()
    old = folder.job() if dumped else None
    if dumped is None or old is None:
        _create(cluster, folder, wanted)
        return ResumeState(suspend)
    if not is_true(old, "Finished") and _is_same(old, wanted):
        cluster.load(dumped)
        return _resume(cluster, folder, old, wanted, say)
    if is_true(old, "Finished"):
        say(f"{folder.name} has finished before: a new job takes its place and finds its checkpoints (--fresh: none)")
    else:
        say(f"the spec of {folder.name} has changed: a new job takes its place and resumes from the checkpoints")
    # As `kubectl delete` and `kubectl apply` would: pods and events go, claims stay.
    claims = [[plural, obj] for plural, obj in dumped["objects"] if plural == names.CLAIMS.plural]
    cluster.load(dumped | {"objects": [[p, o] for p, o in claims if not o["metadata"].get("ownerReferences")]})
    _create(cluster, folder, wanted)
    return ResumeState(suspend)


def forget(folder: JobFolder, state: StateFolder, wanted: Json, volumes: Mapping[str, Path], say: Say) -> None:
    """``--fresh``: no record, no logs, no checkpoints on the claim that is made for the job."""
    (folder.path / "cluster.json").unlink(missing_ok=True)
    _remove(folder.path / "pods")
    job = job_of(wanted)
    if job.spec.checkpoint is None or job.spec.checkpoint.claim_template is None:
        return
    if job.claim in volumes:
        say(
            f"--fresh leaves {volumes[job.claim]} as it is: it is your directory; empty it to begin without checkpoints"
        )
    else:
        _remove(state.volume(folder.namespace, job.claim))


def check_volumes(wanted: Json, volumes: Mapping[str, Path]) -> None:
    """Whether the user's directories are there and stand for claims of this job. Raises ``LocalError``."""
    claims = _claims(wanted)
    for claim, directory in volumes.items():
        if claim not in claims:
            named = f"its claims are {', '.join(claims)}" if claims else "it has no claims"
            raise LocalError(f"the job has no claim {claim}", named, "name one of its claims in --volume CLAIM=DIR")
        if not directory.is_dir():
            raise LocalError(
                f"{directory}, given for claim {claim}, is no directory",
                "a directory of your own is never made, so that a slip of the pen cannot pass for an empty volume",
                f"make it: mkdir -p {shlex.quote(str(directory))}",
            )


def explain(wanted: Json, folder: StateFolder, volumes: Mapping[str, Path], say: Say) -> None:
    """What differs from a cluster, in a line, and which directories stand for claims of the user's own."""
    job = job_of(wanted)
    pod = desired_pods(job, 1, EngineSettings())[0].body
    say(
        "local mode: images, resource limits, security contexts, probes, placement and network policies are not "
        "enforced, and mount paths are translated into directories of this machine"
    )
    if not pod["spec"]["containers"][0].get("command"):
        say(f"no command is given: `{ENTRYPOINT}`, the entrypoint of this project's image, is run")
    own = job.claim if job.spec.checkpoint is not None and job.spec.checkpoint.claim_template is not None else ""
    for claim in _claims(wanted):
        if claim != own and claim not in volumes:
            place = folder.volume(job.namespace, claim)
            say(f"claim {claim} is {place}; name another directory with --volume {claim}=DIR")


def _claims(wanted: Json) -> list[str]:
    """All claims that the job's pods mount."""
    pod = desired_pods(job_of(wanted), 1, EngineSettings())[0].body
    sources = [volume.get("persistentVolumeClaim") or {} for volume in pod["spec"].get("volumes") or ()]
    return [source["claimName"] for source in sources if "claimName" in source]


def _create(cluster: MemoryCluster, folder: JobFolder, wanted: Json) -> None:
    _remove(folder.path / "pods")
    cluster.server.create(names.DDPJOBS, folder.namespace, _as_written(wanted))


def _as_written(wanted: Json) -> Json:
    kept = {key: value for key, value in wanted["metadata"].items() if key != "resourceVersion"}
    return wanted | {"metadata": kept}


def _is_same(old: Json, wanted: Json) -> bool:
    """Whether an apply could turn one into the other: what is immutable, template included, must be as it was."""
    try:
        return spec_hash(parse_spec(old)) == spec_hash(parse_spec(wanted))
    except ValidationError:
        return False  # written by another version


def _resume(cluster: MemoryCluster, folder: JobFolder, old: Json, wanted: Json, say: Say) -> ResumeState:
    suspend = bool(wanted["spec"].get("suspend"))
    settled = is_true(old, "Suspended") or not (old.get("status") or {}).get("attempt")
    # No process of an earlier run lives on: what looks alive died with it.
    for pod in folder.pods():
        if not is_over(pod):
            name = pod["metadata"]["name"]
            remove_own(folder.pod(name))
            cluster.server.delete(names.PODS, folder.namespace, name, grace_seconds=0)
    change = status_patch(old["spec"], wanted["spec"]) | {"suspend": suspend if settled else True}
    cluster.server.patch(names.DDPJOBS, folder.namespace, folder.name, {"spec": change})
    if settled:
        if not suspend and is_true(old, "Suspended"):
            say(resumed(old))
        return ResumeState(suspend)
    last = datetime.fromtimestamp((folder.path / "cluster.json").stat().st_mtime, UTC)
    return ResumeState(suspend, min(last, datetime.now(UTC)))


def resumed(job: Json) -> str:
    """The line that tells of a resumption."""
    return f"Resumed: attempt {job['status']['attempt'] + 1} begins"


def _remove(folder: Path) -> None:
    """A folder of ours with all that is in it; never what a link in it leads to."""
    if folder.is_symlink():
        raise LocalError(
            f"{folder} is a symbolic link", "only folders of local mode's own are emptied", f"remove it: rm {folder}"
        )
    if os.path.lexists(folder):
        shutil.rmtree(folder)
