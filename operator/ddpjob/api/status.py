"""The status of a DDPJob: what the operator decided and what it sees, written by one patch per reconcile.

Numbers of the training (loss, accuracy) are strings: NaN is not JSON, and a float would not survive a round trip.
"""

import re
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ddpjob.api.model import ApiModel

_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def is_time(value: str) -> bool:
    """Return whether a text is a time of RFC 3339 with seconds: the format ``date-time`` of the API server."""
    if not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        return False
    return True


def _time(value: str) -> str:
    if not is_time(value):
        raise PydanticCustomError("time_type", "must be a time of RFC 3339, for example 2026-03-01T12:00:00Z")
    return value


Time = Annotated[str, AfterValidator(_time), Field(json_schema_extra={"format": "date-time"})]
CONDITIONS = (
    "Scheduled",
    "Running",
    "Restarting",
    "Suspended",
    "Succeeded",
    "Failed",
    "Finished",
    "Reconciling",
    "Stalled",
)
State = Literal["Pending", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Invalid"]


class Condition(ApiModel):
    """One aspect of the job's state, in the form of Kubernetes' API conventions."""

    list_keys: ClassVar[tuple[str, ...]] = ("type",)

    type: Literal[CONDITIONS]  # type: ignore[valid-type]
    """The aspect. Finished is True when the job succeeded and when it failed: wait for that one."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=2048)]
    """Why, for a person, and what to do."""
    last_transition_time: Time
    """When `status` last changed."""


class World(ApiModel):
    """The distributed world that the current attempt forms."""

    num_nodes: int
    """Number of nodes."""
    nproc_per_node: int
    """Processes per node."""
    world_size: int
    """Processes in total: numNodes × nprocPerNode."""
    master_address: str
    """Host and port that all ranks meet at."""


class Nodes(ApiModel):
    """Pods of the current attempt by state."""

    desired: int
    """Pods that the attempt needs."""
    pending: int
    """Pods that do not run yet."""
    running: int
    """Pods whose trainer runs."""
    succeeded: int
    """Pods whose trainer ended with 0."""
    failed: int
    """Pods whose trainer failed."""


class Progress(ApiModel):
    """Rank 0's last report."""

    display: str
    """The whole of it in a few words."""
    phase: str | None = None
    """What the trainer is doing: data, train, evaluate, ..."""
    epoch: int | None = None
    """Current epoch, from 1."""
    total_epochs: int | None = None
    """Epochs in all."""
    step: int | None = None
    """Finished optimizer steps."""
    total_steps: int | None = None
    """Optimizer steps in all."""
    percent: int | None = None
    """Finished steps of all, in percent."""
    loss: str | None = None
    """Mean loss of the last reported step."""
    accuracy: str | None = None
    """Accuracy of the last evaluation, from 0 to 1."""
    samples_per_second: str | None = None
    """Samples per second of the whole job."""
    eta_seconds: int | None = None
    """Seconds to the end at this speed."""
    last_heartbeat_time: Time | None = None
    """When the trainer finished the work that this report speaks of."""


class CheckpointStatus(ApiModel):
    """The last checkpoint that the trainer reported."""

    path: str
    """File, relative to checkpoint.mountPath."""
    step: int
    """Step it holds."""
    time: Time
    """When the operator learned of it."""
    resumed_from_step: int | None = None
    """Step of the checkpoint that the current attempt began with; absent when it began from zero."""


class Failure(ApiModel):
    """Why an attempt ended."""

    list_keys: ClassVar[tuple[str, ...]] = ("attempt",)

    attempt: int
    """The attempt that failed."""
    rank: int | None = None
    """node_rank of the pod that failed first."""
    pod: str | None = None
    """Name of that pod; it stays, with its logs, until the next attempt ends."""
    node_name: str | None = None
    """Kubernetes node it ran on."""
    exit_code: int | None = None
    """Exit code of the trainer."""
    signal: int | None = None
    """Signal that ended the trainer."""
    reason: str
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=2048)]
    """Why, for a person."""
    action: Literal["Restart", "Fail"]
    """What the operator did about it."""
    counted: bool
    """Whether it was charged to restartPolicy.maxRestarts."""
    time: Time
    """When the operator decided."""


class DDPJobStatus(ApiModel):
    """What the operator sees and has decided."""

    observed_generation: int | None = None
    """Generation of the spec that this status speaks of."""
    spec_hash: str | None = None
    """Digest of the immutable part of the spec that the first attempt began with."""
    state: State | None = None
    """One word for a table. Programs should read the conditions."""
    attempt: int | None = None
    """The current life of the whole group, from 1. Written before its pods are created."""
    complete_attempt: int | None = None
    """The last attempt of which every pod existed at once; from then on a missing pod of it counts as lost."""
    restarts: int | None = None
    """Restarts so far."""
    restarts_counted_towards_limit: int | None = None
    """Those of them charged to restartPolicy.maxRestarts."""
    start_time: Time | None = None
    """When the first attempt began."""
    completion_time: Time | None = None
    """When the job finished."""
    active_seconds: int | None = None
    """Seconds of running up to the last suspension, compared with activeDeadlineSeconds."""
    succeeded_ranks: Annotated[list[int], Field(max_length=4096)] | None = None
    """node_ranks of the current attempt that ended with 0; a pod removed later is no failure."""
    conditions: Annotated[list[Condition], Field(max_length=32)] | None = None
    """The job's state, aspect by aspect."""
    world: World | None = None
    """The distributed world that the current attempt forms."""
    nodes: Nodes | None = None
    """Pods of the current attempt by state."""
    nodes_ready: str | None = None
    """Running or succeeded pods of those desired, for example 2/2."""
    progress: Progress | None = None
    """Rank 0's last report."""
    checkpoint: CheckpointStatus | None = None
    """The last checkpoint that the trainer reported."""
    failures: Annotated[list[Failure], Field(max_length=5)] | None = None
    """Why the last attempts ended, newest last."""
