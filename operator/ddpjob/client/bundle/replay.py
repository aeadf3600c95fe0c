"""``Replay``: what the operator does about a recorded job, as JSON for a person, and as fields for a test."""

from datetime import datetime
from typing import Any

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.bundle.recording import Recording
from ddpjob.engine.actions import Create, Plan, patch_between


class ObjectName(WireModel):
    """An object that is created or deleted."""

    kind: str
    name: str


class ChangedObject(WireModel):
    """An object whose spec is patched."""

    kind: str
    name: str
    spec: dict[str, Any]
    """The merge patch."""


class PlannedEvent(WireModel):
    """A Kubernetes Event about the job."""

    type: str
    reason: str
    message: str


class Replay(WireModel):
    """The plan for a recorded job. Nothing of it is carried out."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    recorded: str
    """When the job was read."""
    now: str
    """The time of the plan."""
    is_idle: bool
    """Whether nothing is written."""
    urgent: bool
    """Whether the status records a decision, after which the operator plans again at once."""
    starts_attempt: int | None = None
    """Number of the attempt whose pods are created."""
    status: dict[str, Any] | None = None
    """The complete new status; absent if it does not change."""
    status_patch: dict[str, Any] | None = None
    """What changes in the status, as a merge patch."""
    deletes: list[ObjectName]
    """Objects that are deleted, after the status was written."""
    changes: list[ChangedObject]
    """Objects that are changed."""
    creates: list[list[ObjectName]]
    """Objects that are created, phase after phase."""
    events: list[PlannedEvent]
    """Events that are sent."""
    requeue_after: float | None = None
    """Seconds after which the plan may be another one without an event."""
    polls: str | None = None
    """The pod that is asked for its progress."""
    reads_logs: list[str]
    """Failed pods whose logs are read first."""
    assumed: list[str]
    """What could not be recorded, and is taken to exist as the job needs it."""


def replay(recording: Recording, now: datetime | None = None) -> Replay:
    """Return what the operator does about the job, by default at the time of the recording."""
    plan = recording.plan(now)
    before = recording.job.get("status") or {}
    return Replay(
        job=recording.name,
        namespace=recording.namespace,
        recorded=timestamp(recording.now),
        now=timestamp(now or recording.now),
        is_idle=plan.status is None and not (plan.deletes or plan.changes or plan.creates or plan.events),
        urgent=plan.urgent,
        starts_attempt=plan.creates_attempt,
        status=plan.status,
        status_patch=patch_between(before, plan.status) if plan.status is not None else None,
        deletes=[ObjectName(kind=delete.resource.kind, name=delete.name) for delete in plan.deletes],
        changes=[
            ChangedObject(kind=change.resource.kind, name=change.name, spec=dict(change.value))
            for change in plan.changes
        ],
        creates=[[_name(create) for create in phase] for phase in plan.creates],
        events=[PlannedEvent(type=note.type, reason=note.reason, message=note.message) for note in plan.events],
        requeue_after=plan.requeue_after,
        polls=plan.poll[0] if plan.poll else None,
        reads_logs=[name for name, _ in plan.logs],
        assumed=sorted(recording.assumed),
    )


def _name(create: Create) -> ObjectName:
    return ObjectName(kind=create.resource.kind, name=create.name)


_TEXTS = frozenset({"message", "hint", "next", "where", "logTail", "specHash", "tokenHash", "display"})
"""Fields of a status that quote the job, or that change with the text of its spec."""


def decisions(plan: Plan) -> Json:
    """Return a plan without the texts in it: what must be the same after redaction."""
    return {
        "status": _without_texts(plan.status),
        "urgent": plan.urgent,
        "deletes": [[delete.resource.kind, delete.name] for delete in plan.deletes],
        "changes": [[change.resource.kind, change.name, change.value] for change in plan.changes],
        "creates": [[[create.resource.kind, create.name] for create in phase] for phase in plan.creates],
        "attempt": plan.creates_attempt,
        "events": [[note.type, note.reason] for note in plan.events],
        "requeueAfter": plan.requeue_after,
        "poll": list(plan.poll) if plan.poll else None,
        "claims": list(plan.claims),
        "logs": [list(pod) for pod in plan.logs],
        "isFirst": plan.is_first,
        "cautious": plan.cautious,
    }


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_texts(item) for key, item in value.items() if key not in _TEXTS}
    return [_without_texts(item) for item in value] if isinstance(value, list) else value
