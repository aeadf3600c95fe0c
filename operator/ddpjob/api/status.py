"""The status of a DDPJob: the operator's decisions and observations, written by one patch per reconcile.

``recorded_status`` reads the status of a job. The models keep fields of other releases and are never changed:
``changed`` returns a copy, and ``wire`` the JSON to write.

Metrics of the training (loss, accuracy) are strings, because JSON has no NaN and floats change in a round trip.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from ddpjob.api.failure import FailureFacts
from ddpjob.api.limits import MAX_ADVICE, MAX_AVOIDED, MAX_LOG_TAIL, MAX_MESSAGE, MAX_NODES, MAX_REASON
from ddpjob.api.model import StatusPart, unique_keys
from ddpjob.api.time_spent import Count, Time, TimeSpent
from ddpjob.api.times import seconds_between

CREATING, RUNNING, ENDING = "Creating", "Running", "Ending"
"""Phases of an attempt."""
RETURNED = "close"
"""The phase of a rank whose script has ended, and whose process has not."""
LONG_RUN_SECONDS = 3600
"""How long a program that reports neither steps nor checkpoints runs before it has trained without any doubt."""
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


class Condition(StatusPart):
    """One aspect of the job's state, as the Kubernetes API conventions define conditions."""

    list_keys: ClassVar[tuple[str, ...]] = ("type",)

    type: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
    """The aspect. Finished is True after success and after failure, so one `kubectl wait` covers both."""
    status: Annotated[str, Field(max_length=MAX_REASON)]
    """Whether the condition holds: True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why, and what to do, for a person."""
    last_transition_time: Time
    """When `status` last changed."""


class World(StatusPart):
    """The distributed world that the current attempt forms."""

    num_nodes: int
    """Number of nodes."""
    nproc_per_node: int
    """Processes per node."""
    world_size: int
    """Processes in total: numNodes × nprocPerNode."""
    master_address: str
    """Host and port of the rendezvous (MASTER_ADDR and MASTER_PORT)."""


class Nodes(StatusPart):
    """Pods of the current attempt by state."""

    desired: int
    """Pods that the attempt needs."""
    pending: int
    """Pods whose trainer has not started."""
    running: int
    """Pods whose trainer is running."""
    succeeded: int
    """Pods whose trainer exited with 0."""
    failed: int
    """Pods whose trainer failed."""


class Progress(StatusPart):
    """Rank 0's last report."""

    display: str
    """Summary for a table column."""
    phase: str | None = None
    """Current phase of the trainer: data, train, evaluate, ..."""
    epoch: int | None = None
    """Current epoch, from 1."""
    total_epochs: int | None = None
    """Total number of epochs."""
    step: int | None = None
    """Finished optimizer steps."""
    total_steps: int | None = None
    """Total number of optimizer steps."""
    percent: int | None = None
    """Finished steps in percent of all steps, or the percentage that the trainer reported."""
    loss: str | None = None
    """Mean loss of the last reported step."""
    accuracy: str | None = None
    """Accuracy of the last evaluation, from 0 to 1."""
    samples_per_second: str | None = None
    """Samples per second of the whole job."""
    steps_per_second: str | None = None
    """Optimizer steps per second."""
    eta_seconds: int | None = None
    """Estimated seconds until the training ends."""
    saving_seconds: Count | None = None
    """Seconds for which saves of checkpoints have blocked the training in the current attempt."""
    last_heartbeat_time: Time | None = None
    """When the trainer finished the work in this report."""


class StallStatus(StatusPart):
    """The rank that the others wait for, or that is the furthest behind, while the ranks make no steps."""

    rank: Count | None = None
    """Global rank."""
    step: Count | None = None
    """Its last optimizer step."""
    where: Annotated[str, Field(max_length=MAX_ADVICE)] | None = None
    """File and line in the user's code."""
    phase: str | None = None
    """What it does; ``close`` if its script has ended, and its process has not."""

    def text(self) -> str:
        """Return which rank it is, where, and what is wrong with it."""
        where = f" at {self.where}" if self.where else ""
        if self.phase == RETURNED:
            return f"rank {self.rank} has ended its script, and its process has not ended{where}"
        return f"the others wait for rank {self.rank}, step {self.step}{where}"


class SlowStatus(StatusPart):
    """The rank for which the others wait in each step, because a part of its steps takes longer."""

    since: Time
    """When it was reported first."""
    rank: Count | None = None
    """Global rank."""
    part: str | None = None
    """data, forward, backward, communication, optimizer, collection (of garbage), throttled, queue or script."""
    node_name: str | None = None
    """Kubernetes node of its pod."""
    seconds: str | None = None
    """How long the others wait for it in each step."""
    step_seconds: str | None = None
    """Time of a step."""
    throttled: str | None = None
    """With the part throttled: for how many seconds of each second the CPU limit of its container stops it."""

    def text(self) -> str:
        """Return which rank it is, and what the others wait for."""
        times = f" {self.seconds} s of each step of {self.step_seconds} s" if self.seconds and self.step_seconds else ""
        part = f": {self.part}" if self.part else ""
        node = f" (Kubernetes node {self.node_name})" if self.node_name else ""
        stopped = f", for {self.throttled} s of each second" if self.throttled else ""
        return f"the others wait{times} for rank {self.rank}{node}{part}{stopped}"


class DivergedStatus(StatusPart):
    """A parameter that is to be the same on all ranks, and is not."""

    since: Time
    """When it was reported first."""
    step: Count
    """The first step that showed it."""
    agreed_step: Count | None = None
    """The last step at which the tensor was the same on all ranks."""
    rank: Count | None = None
    """The first global rank that differs from most others; absent if no value has a majority, as with two ranks."""
    tensor: str | None = None
    """Its name in the module."""
    cause: str | None = None
    """The likely mistake: noSync, gradients, settings, outside, seed, optimizer or memory."""

    def text(self) -> str:
        """Return which tensor differs, and since when."""
        who = "between the ranks" if self.rank is None else f"on rank {self.rank}"
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.tensor or 'a parameter'} differs {who} since step {self.step}{cause}"


class NotFiniteLoss(StatusPart):
    """A loss that is NaN or infinite in the last reports."""

    since: Time
    """When it was reported first."""
    step: Count
    """Of that loss."""
    last_step: Count
    """Step of the last such loss that was counted."""
    reports: Count
    """Of such losses at different steps; not counted beyond 3."""


class PauseStatus(StatusPart):
    """Rank 0 has made no step for much longer than a step, and than all its pauses before, took. It may go on."""

    since: Time
    """When it last finished work."""
    step_seconds: str | None = None
    """Median time of its steps before."""

    @property
    def median(self) -> float | None:
        """``step_seconds`` as a number; None if it is no possible time: any program may report it."""
        try:
            seconds = float(self.step_seconds or 0)
        except ValueError:
            return None
        return seconds if 1e-6 <= seconds <= 1e9 else None

    def text(self, now: datetime) -> str:
        """Return how long the pause has lasted."""
        seconds = int(seconds_between(self.since, now))
        times = f", {seconds / self.median:.0f} times the median step" if self.median else ""
        return f"no step for {seconds} s{times}"


class Furthest(StatusPart):
    """How far the job has got in all attempts, and how often it was restarted without getting further."""

    checkpoint_step: Count | None = None
    """The highest step of a checkpoint that the trainer reported."""
    step: Count | None = None
    """The highest step that the trainer reported itself, if it never reported a checkpoint."""
    trained: bool | None = None
    """true: an attempt made a step that the program did not report itself, or ran with all its pods for a minute."""
    restarts_since: Count | None = None
    """Restarts after failures since then, with new pods and in place."""


class CheckpointStatus(StatusPart):
    """The last checkpoint that the trainer reported."""

    path: str
    """File, relative to checkpoint.mountPath."""
    step: int
    """Optimizer step of the checkpoint."""
    time: Time
    """When the operator first saw the checkpoint reported."""
    resumed_from_step: int | None = None
    """Step of the checkpoint that the current attempt resumed from; absent if it started from zero."""
    agreed_path: str | None = None
    """File of the newest checkpoint at which all ranks are known to have had the same parameters."""
    agreed_step: int | None = None
    """Its step."""


class Failure(FailureFacts, StatusPart):
    """Why an attempt ended."""

    attempt: Count
    """The attempt that failed."""
    node_rank: Count | None = None
    """node_rank of the pod that failed first."""
    reason: str
    """Why, in one CamelCase word (docs/reference/failures.md)."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why, for a person."""
    log_tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] | None = None
    """End of the log, if the trainer wrote no report; absent with `spec.logTail: Omit`."""
    action: str
    """The operator's reaction: Restart or Fail."""
    counted: bool
    """Whether the restart counts towards restartPolicy.maxRestarts."""
    provisional: bool | None = None
    """true: the restart no longer counts if the Kubernetes node is found lost within 120 s."""
    node_suspected: bool | None = None
    """true: the Kubernetes node may be the cause. Two such failures on one node put it into `status.avoidNodes`."""
    time: Time
    """When the operator decided."""


class Ending(StatusPart):
    """How an attempt ends."""

    verdict: Annotated[str, Field(max_length=MAX_REASON)] | None = None
    """Why it ended, in one CamelCase word. Absent while the operator waits for the cause of a failure."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] | None = None
    """Why it ended, for a person."""
    since: Time
    """When the ending began."""
    until: Time | None = None
    """When the wait for the cause ends at the latest, or after the verdict: when the next attempt starts."""
    drain_until: Time | None = None
    """When the next attempt probably starts at the latest. It starts when the pods of earlier attempts have ended; the
    deletionTimestamp of each limits the wait."""


class SlowNode(StatusPart):
    """A Kubernetes node on which a rank was slow for ten minutes of an attempt, in a part that depends on the node."""

    node_name: str
    """Name of the Kubernetes node."""
    attempt: Count
    """The attempt."""
    rank: Count
    """Global rank. If it was slow on another Kubernetes node as well, the rank is the cause, and no node."""
    part: str
    """forward, backward, optimizer or queue, as in `status.slow`."""
    since: Time
    """When it was reported first."""
    time: Time
    """When rank 0 last reported while it was slow."""


class AvoidedNode(StatusPart):
    """A Kubernetes node on which new attempts do not run, or which they use only if the scheduler prefers no other."""

    node_name: str
    """Name of the Kubernetes node."""
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    """Reason of the last failure on it; TrainingSlow: a rank was slow there, so others are only preferred."""
    until: Time
    """When the node is used again. Attempts that started before keep avoiding it."""
    attempts: Annotated[list[Count], Field(max_length=MAX_AVOIDED)] | None = None
    """With TrainingSlow: the attempts in which it was slow."""

    @property
    def is_slow(self) -> bool:
        """Whether it was only slow: the pods may run on it, and other Kubernetes nodes are preferred."""
        return self.attempts is not None

    @property
    def why(self) -> str:
        """Why it is avoided: the reason of a failure, or the attempts in which it was slow."""
        return f"slow in attempts {', '.join(map(str, self.attempts))}" if self.attempts else self.reason


class RefusedStart(StatusPart):
    """A container that the kubelet does not start, and which perhaps never starts."""

    node_rank: Count
    """node_rank of its pod."""
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    """Why, as the kubelet gives it: CreateContainerConfigError or InvalidImageName."""
    since: Time
    """When the operator first saw it. The attempt fails some time later (docs/reference/failures.md)."""


class LifeFailure(StatusPart):
    """Why a life of an attempt ended: one start of all its processes."""

    life: Count
    """Number of the life, from 1."""
    node_rank: Count | None = None
    """node_rank of the pod in which a process failed first."""
    rank: int | None = None
    """Global rank of that process."""
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    """Why, in one CamelCase word, from the trainer's report."""
    message: Annotated[str, Field(max_length=MAX_ADVICE)]
    """Why, for a person."""
    progressed: bool
    """Whether the life made progress beyond those before it."""
    recovery_milliseconds: Count | None = None
    """From the failure to the first step of the next life."""


class InPlace(StatusPart):
    """Restarts of the processes of an attempt in its pods, without new ones."""

    granted: Count
    """How many the launchers may make by themselves. Recorded with the start of the attempt."""
    life: Count | None = None
    """Number of the current life, from 1, as node 0 reports it. Each later life was one restart in place."""
    failures: Annotated[list[LifeFailure], Field(max_length=5)] | None = None
    """Why the last lives ended, newest last."""


class Size(StatusPart):
    """The number of nodes of an attempt of a job with `minNodes`, and when it changed."""

    nodes: Count
    """Number of nodes."""
    smaller_since: Time | None = None
    """Since when it is smaller than numNodes; absent at full size."""
    shrunk_time: Time | None = None
    """When it last became smaller."""
    grown_time: Time | None = None
    """When it last became larger."""
    probe_time: Time | None = None
    """When pods last asked the scheduler whether there is room for more nodes."""
    misses: Count | None = None
    """Growths in a row after which not all nodes were placed. Each doubles the time to the next growth."""


class CurrentAttempt(StatusPart):
    """The current attempt: one start of all pods together."""

    number: Count
    """Number of the attempt, from 1."""
    phase: str
    """Creating: pods are being created. Running: all existed, so a missing pod is lost. Ending: see `ending`."""
    start_time: Time
    """When the attempt started."""
    token_hash: Annotated[str, Field(max_length=64)] | None = None
    """SHA-256 of the token by which the launchers in its pods recognise each other (docs/concepts/security.md)."""
    all_running_time: Time | None = None
    """When all its pods first ran at the same time."""
    first_step_time: Time | None = None
    """When the operator first saw a step of this attempt reported."""
    first_success_time: Time | None = None
    """When the operator first saw one of its nodes succeed."""
    failures_in_row: Count | None = None
    """Attempts in a row, before this one, that failed without progress. They decide on the delay of a restart."""
    refusals: Count | None = None
    """Attempts in a row, with this one, that were abandoned before all their pods existed. They are no restarts."""
    creating_since: Time | None = None
    """When the first of the attempts in `refusals` or `yields` started. `startupDeadlineSeconds` counts from then."""
    room_since: Time | None = None
    """With `avoidNodes` or `minNodes`, while a pod has no Kubernetes node: since when no pod of an earlier attempt uses
    resources. The waits for Kubernetes nodes count from then."""
    no_other_node_since: Time | None = None
    """With `avoidNodes`: since when the scheduler names no other Kubernetes node for a pod, also none that is only
    full; absent otherwise."""
    partial_since: Time | None = None
    """Since when some of its pods have a Kubernetes node and others do not; absent otherwise
    (docs/concepts/scheduling.md)."""
    pod_priority: int | None = None
    """Priority of its pods, recorded with `partialSince`; absent for 0."""
    yields: Count | None = None
    """Attempts in a row, with this one, that gave their nodes back before all pods ran. They are no restarts."""
    elder_seconds: Count | None = None
    """For how many seconds earlier attempts, since all pods last ran, were partial as the first of all jobs. Others
    yield to it for a limited time (docs/concepts/scheduling.md)."""
    refused_start: RefusedStart | None = None
    """A container that keeps a trainer from starting; absent otherwise."""
    fenced: bool | None = None
    """true: its launcher has reported that an older attempt cannot save beside a newer one (`checkpoint.fenced`)."""
    in_place: InPlace | None = None
    """Restarts of its processes in the same pods."""
    size: Size | None = None
    """Its number of nodes, in a job with `minNodes` whose size changed; absent: numNodes."""
    next_size: Size | None = None
    """The size of the next attempt, after the end of this one; absent: the same."""
    ending: Ending | None = None
    """How it ends; absent before."""

    @property
    def verdict(self) -> str | None:
        """Why the attempt ended; None as long as it has not ended, or the cause is not known."""
        return self.ending.verdict if self.ending else None

    @property
    def message(self) -> str:
        """Why the attempt ended, for a person; empty before."""
        return (self.ending.message if self.ending else None) or ""

    @property
    def is_creating(self) -> bool:
        return self.number > 0 and self.phase == CREATING

    @property
    def is_settling(self) -> bool:
        """Whether the attempt ends, and its cause is not known yet."""
        return self.number > 0 and self.phase == ENDING and self.verdict is None

    @property
    def is_closed(self) -> bool:
        """Whether the attempt ended with a verdict, or none has started yet."""
        return self.number == 0 or self.verdict is not None


class DDPJobStatus(StatusPart):
    """The observed state of the job and the operator's decisions."""

    observed_generation: int | None = None
    """Generation of the spec that this status was computed from."""
    spec_hash: str | None = None
    """Digest of the parts of the spec that CEL rules cannot compare, when the first attempt started."""
    state: str | None = None
    """State in one word, for tables. Programs should read the conditions."""
    attempt: Count | None = None
    """Number of the current attempt, from 1. Written before the attempt's pods are created."""
    current_attempt: CurrentAttempt | None = None
    """The current attempt, with its phase."""
    restarts: Count | None = None
    """Number of restarts: with new pods, and in place."""
    restarts_in_place: Count | None = None
    """Number of those restarts that were in place."""
    restarts_counted_towards_limit: Count | None = None
    """Number of restarts that count towards restartPolicy.maxRestarts. Reset at the end of an attempt with progress."""
    restarts_counted_towards_total: Count | None = None
    """Number of restarts since the last progress that count towards restartPolicy.maxTotalRestarts: all but those after
    planned losses."""
    start_time: Time | None = None
    """When the first attempt started."""
    completion_time: Time | None = None
    """When the job finished."""
    active_seconds: Count | None = None
    """Seconds that earlier attempts were active. With the current attempt: compared with activeDeadlineSeconds."""
    succeeded_nodes: Annotated[list[Count], Field(max_length=MAX_NODES)] | None = None
    """node_ranks of the current attempt that exited with 0. Deleting their pods later is not a failure."""
    conditions: Annotated[list[Condition], Field(max_length=32)] | None = None
    """Conditions of the job."""
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
    stall: StallStatus | None = None
    """Present while the condition Running has the reason TrainingStalled."""
    slow: SlowStatus | None = None
    """Present while the others wait for the same rank in most steps. The attempt goes on."""
    diverged: DivergedStatus | None = None
    """Present while the ranks do not have the same parameters (`onDivergence`)."""
    loss_not_finite: NotFiniteLoss | None = None
    """Present while the reported loss is NaN or infinite. Nothing follows from it."""
    pause: PauseStatus | None = None
    """Present while rank 0 makes no step for much longer than before. Nothing follows from it."""
    furthest: Furthest | None = None
    """How far the job has got, and the restarts since."""
    failures: Annotated[list[Failure], Field(max_length=5)] | None = None
    """Why the last attempts ended, newest last."""
    avoid_nodes: Annotated[list[AvoidedNode], Field(max_length=MAX_AVOIDED)] | None = None
    """Kubernetes nodes on which new attempts do not run, because two failures point to them, or which were slow."""
    slow_nodes: Annotated[list[SlowNode], Field(max_length=MAX_AVOIDED)] | None = None
    """With `scheduling.avoidSlowNodes`: Kubernetes nodes on which a rank was slow, and in which attempts."""
    time: TimeSpent | None = None
    """Where the time of the job went."""
    restarted_at: Time | None = None
    """The last spec.restartedAt that was carried out."""

    _unique = model_validator(mode="after")(unique_keys)

    @property
    def has_trained(self) -> bool:
        """Whether it is recorded that an attempt made a step, saved a checkpoint, or ran for long enough."""
        if self.furthest is not None or (self.current_attempt and self.current_attempt.first_step_time is not None):
            return True
        # Without an operator, an attempt may have begun and ended with no other trace.
        return self.time is not None and self.time.training >= LONG_RUN_SECONDS

    def is_true(self, kind: str) -> bool:
        """Return whether the condition of this type is True."""
        return any(condition.type == kind and condition.status == "True" for condition in self.conditions or ())


def recorded_status(status: Mapping[str, Any]) -> DDPJobStatus:
    """Return the status of a job, without top-level fields of a wrong form, which a user or a program spoiled."""
    try:
        return DDPJobStatus.model_validate(status, by_alias=True, by_name=False)
    except ValidationError as error:
        wrong = [item["loc"] for item in error.errors()]
    spoiled = {place[0] if place else "conditions" for place in wrong}  # only conditions have rules of a whole list
    return recorded_status({key: value for key, value in status.items() if key not in spoiled})
