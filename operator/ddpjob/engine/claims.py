"""Whether an existing PersistentVolumeClaim may be used as the claim of a job's ``checkpoint.claimTemplate``.

The claim outlives the job, so a job that is created again with the same name finds it. A claim of that name that
another program or user made may be too small, or mountable on one node only: it is used only if it fits the template.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, event_time
from ddpjob.api.quantities import amount
from ddpjob.api.text import clean, shorten
from ddpjob.engine.actions import Note

ADOPTED = "ClaimAdopted"
_MAX_TEXT = 500


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


def unbound_claim(name: str, claim: Json | None, events: Sequence[Json]) -> str:
    """Return why a claim is not bound; empty if it is.

    Args:
        claim: None if it does not exist.
        events: of the claim. The newest says why, for example that its storage class does not exist, that nothing
            provisions it, or that it waits for its first pod.
    """
    if claim is None:
        return f"claim {name} does not exist"
    phase = (claim.get("status") or {}).get("phase", "Pending")
    if phase == "Bound":
        return ""
    if not events:
        return f"claim {name} is {phase}"
    last = max(events, key=event_time)
    return shorten(clean(f"claim {name} is {phase}: {last.get('reason')}: {last.get('message')}"), _MAX_TEXT)


def claim_conflict(found: Json, wanted: Json, job: str) -> str | None:
    """Return why ``found`` cannot be the claim of the job with this name; None if it can.

    Args:
        found: the existing claim.
        wanted: the claim that the operator would create.
        job: name of the DDPJob.
    """
    label = _label(found)
    if label == job:
        return None
    faults = (
        [f"it belongs to the DDPJob {label}"] if label is not None else list(_misfits(found["spec"], wanted["spec"]))
    )
    if not faults:
        return None
    return (
        f"PersistentVolumeClaim {found['metadata']['name']} exists, was not created for this DDPJob and does not fit "
        f"checkpoint.claimTemplate: {'; '.join(faults)}: delete or rename it, name it in checkpoint.claimName, or give "
        "the DDPJob another name"
    )


def is_claim_of(claim: Json | None, job: str) -> bool:
    """Return whether a cached claim is in use by the job: it has the job's label, or was adopted and has none."""
    return claim is not None and _label(claim) in (job, None)


def adoption(found: Json, job: Json) -> Note | None:
    """Return the event about the adoption of a claim; None if the job itself created it."""
    meta = found["metadata"]
    if _label(found) is None:
        spec = found["spec"]
        facts = f"{_storage(spec)}, {', '.join(spec.get('accessModes') or ())}"
        return Note("Normal", ADOPTED, f"uses the claim {meta['name']}, which the operator did not create: {facts}")
    if meta.get("creationTimestamp", "") < job["metadata"].get("creationTimestamp", ""):
        return Note("Normal", ADOPTED, f"uses the claim {meta['name']} of an earlier job of this name")
    return None


def _label(claim: Json) -> str | None:
    value: str | None = (claim["metadata"].get("labels") or {}).get(names.LABEL_JOB_NAME)
    return value


def _misfits(found: Json, wanted: Json) -> Iterator[str]:
    if missing := sorted(set(wanted.get("accessModes") or ()) - set(found.get("accessModes") or ())):
        yield f"it lacks the access mode {', '.join(missing)}"
    if not _is_large_enough(_storage(found), _storage(wanted)):
        yield f"it requests {_storage(found)} of storage, not {_storage(wanted)}"
    for field in ("storageClassName", "volumeName"):
        if wanted.get(field) is not None and found.get(field) != wanted[field]:
            yield f"its {field} is {found.get(field)!r}, not {wanted[field]!r}"
    modes = [spec.get("volumeMode") or "Filesystem" for spec in (found, wanted)]
    if modes[0] != modes[1]:
        yield f"its volumeMode is {modes[0]}, not {modes[1]}"


def _storage(spec: Json) -> Any:
    return ((spec.get("resources") or {}).get("requests") or {}).get("storage", 0)


def _is_large_enough(found: Any, wanted: Any) -> bool:
    try:
        return amount(found) >= amount(wanted)
    except ValueError:
        return False
