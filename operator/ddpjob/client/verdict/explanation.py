"""``Explanation``: why a job is in its state, with the evidence. Its JSON is that of ``ddpjob why -o json``."""

from typing import Annotated, Literal

from pydantic import Field

from ddpjob.api.failure import FailureFacts
from ddpjob.api.model import WireModel

Stage = Literal[
    "Refused",
    "Quota",
    "Starting",
    "Placement",
    "Volume",
    "Image",
    "Configuration",
    "Rendezvous",
    "FirstStep",
    "Running",
    "Slow",
    "Hang",
    "Crash",
    "Disruption",
    "Deadline",
    "WaitingForRetry",
    "Suspended",
    "OperatorDown",
    "Interrupted",
    "Succeeded",
]
"""What docs/tasks/python.md describes for each word."""
Confidence = Literal["High", "Medium", "Low"]
NORMAL: frozenset[Stage] = frozenset({"Starting", "FirstStep", "Running", "Suspended", "Succeeded"})
"""Stages that need no action, unless their reason says so."""


class Evidence(WireModel):
    """One value of one object that the verdict rests on."""

    kind: str
    """Kind of the object: DDPJob, Pod, PersistentVolumeClaim, ResourceQuota, Event, Deployment, Log, ..."""
    name: str
    """Name of the object; of another namespace than the job's, with the namespace: ddpjob-system/ddpjob-operator."""
    field: str
    """Path of the field in the object; empty for a log."""
    value: str
    """Value of the field, or the line of the log."""


class Explanation(FailureFacts):
    """Why a job is in its state."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    state: str
    """State of the job, as in its status."""
    stage: Stage
    """Where the job is in its life, or where it failed."""
    reason: str
    """Why, in one CamelCase word: of a condition, of status.failures, or Taint, Resource, Affinity, ..."""
    is_abnormal: bool
    """Whether the state needs attention: the job does not go on, or not as it should."""
    sentence: str
    """The verdict in one sentence."""
    confidence: Confidence
    """How sure the verdict is."""
    evidence: Annotated[list[Evidence], Field(min_length=1)]
    """What it rests on, the most important first."""
    operator: Literal["Alive", "Down", "Unknown"]
    """Whether the operator works; on this machine, whether a process runs the job."""
    unread: Annotated[list[str], Field(default_factory=list)]
    """What would make the verdict more certain and could not be read, with the reason."""
    missing_nodes: list[int] | None = None
    """Ranks of the nodes that do not run, while the others wait for them."""
    until: str | None = None
    """When the next attempt starts."""
