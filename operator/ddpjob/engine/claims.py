"""The PersistentVolumeClaims of jobs.

The claim of a ``checkpoint.claimTemplate`` outlives the job, and a job of the same name that follows uses it. A
claim of that name that another program or user made is not used.
"""

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Note

ADOPTED = "ClaimAdopted"


def claim_of_checkpoints(job: Json) -> str:
    """Return the name of the claim of a stored job's checkpoints; empty without any."""
    spec = job["spec"]
    checkpoint = spec.get("checkpoint") if isinstance(spec, dict) else None  # the spec may be too large to be kept
    if not isinstance(checkpoint, dict):
        return ""
    return str(checkpoint.get("claimName") or names.claim_name(job["metadata"]["name"]))


def claim_in_use(job: Json) -> str:
    """Return claim and directory of the checkpoints of a stored job, as ``PodView.claim``; empty without any."""
    claim = claim_of_checkpoints(job)
    return names.claim_place(claim, job["spec"]["checkpoint"].get("subPath")) if claim else ""


def is_claim_of(claim: Json, job: str) -> bool:
    """Return whether the operator created a claim for a job of this name."""
    labels = claim["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_JOB_NAME) == job)


def adoption(found: Json, job: Json) -> Note | None:
    """Return the event about the use of a claim of an earlier job; None if the job itself created it."""
    meta = found["metadata"]
    if meta.get("creationTimestamp", "") < job["metadata"].get("creationTimestamp", ""):
        return Note("Normal", ADOPTED, f"uses the claim {meta['name']} of an earlier job of this name")
    return None
