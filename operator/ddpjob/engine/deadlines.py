"""The deadlines of a job. Each returns how many seconds are left and what happens then; ``decision`` orders them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ddpjob.api.pod_view import PodView
from ddpjob.api.status import RUNNING
from ddpjob.api.times import seconds_between, seconds_since, timestamp
from ddpjob.engine.evidence import CONFIG_ERROR, INVALID_IMAGE, is_refused
from ddpjob.engine.failures import COMPLETION_EXCEEDED
from ddpjob.engine.obstacles import UNKNOWN_SECONDS, obstacles
from ddpjob.engine.state import JobState
from ddpjob.engine.suspects import (
    NODES_NEEDED,
    UNSCHEDULABLE_SECONDS,
    avoided,
    banned,
    no_other_node_since,
    others_are_full,
)

REFUSED_SECONDS = {CONFIG_ERROR: 60, INVALID_IMAGE: 10}
"""How long the kubelet may refuse to start a container: a Secret may have been applied together with the job."""
REFUSED_LATER_SECONDS, REFUSED_EVERYWHERE_SECONDS = 60, 1800
"""The same for a job that has trained; the second if none of its pods starts: a Secret is away while it is replaced."""
_LONGEST_COMPLETION = 8
"""How many times completionGraceSeconds an attempt waits at most: a hang holds the GPUs for hours, and not for days."""


@dataclass(frozen=True)
class Deadline:
    """A deadline of the current attempt.

    left: seconds until it passes; it has passed at 0.
    ends: "job": the job fails. "attempt": the attempt fails, and the restart counts. "abandons": the attempt ends, and
        the next one costs nothing.
    refused: the pod that does not start, if this is the reason: it is judged like a pod that ended.
    """

    left: float
    ends: Literal["job", "attempt", "abandons"]
    reason: str
    message: str
    refused: PodView | None = None


def deadlines(s: JobState) -> list[Deadline]:
    """Return the deadlines that run now, those that end the job first."""
    return [deadline for timer in _TIMERS if (deadline := timer(s)) is not None]


def _active(s: JobState) -> Deadline | None:
    limit = s.job.spec.active_deadline_seconds
    if limit is None or s.attempt.number == 0 or s.suspended:
        return None
    text = (
        f"active for {int(s.active_seconds)} s, activeDeadlineSeconds is {limit}: increase it, or train fewer epochs; "
        "the checkpoints are kept"
    )
    return Deadline(limit - s.active_seconds, "job", "DeadlineExceeded", text)


def _startup(s: JobState) -> Deadline | None:
    """The start of an attempt; attempts that were abandoned one after the other before they ran count as one."""
    limit = s.job.spec.startup_deadline_seconds
    if limit is None or s.attempt.is_settling or s.attempt.first_success_time:
        return None
    if s.attempt.is_closed and (s.attempt.creating_since is None or s.spec_edited):
        return None
    all_ran = s.attempt.all_running_time is not None
    if all_ran and (s.attempt.first_step_time or s.answer is None):
        return None
    left = limit - seconds_between(s.attempt.creating_since or s.attempt.start_time, s.now)
    if all_ran:
        text = f"attempt {s.attempt.number} has reported no step within {limit} s (startupDeadlineSeconds)"
        return Deadline(left, "attempt", "StartupDeadlineExceeded", text)
    pods = {} if s.attempt.is_closed else s.current
    waiting = [r for r in s.job.node_ranks if r not in pods or pods[r].state == "pending"]
    text = f"{len(waiting)} of {s.job.nodes} nodes have not started within {limit} s (startupDeadlineSeconds)"
    obstacle = (s.attempt.verdict, s.attempt.message) if s.attempt.verdict else next(obstacles(s), None)
    if obstacle:
        text += f": {obstacle[0]}: {obstacle[1]}"
    return Deadline(left, "job", "StartupDeadlineExceeded", text)


def _progress(s: JobState) -> Deadline | None:
    limit = s.job.spec.progress_deadline_seconds
    stalled = s.observed.progress.stalled_seconds
    if limit is None or s.attempt.phase != RUNNING or stalled is None or s.answer is None or not s.has_stepped:
        return None
    text = (
        f"step {s.answer.step} of attempt {s.attempt.number} has been the last for {limit} s (progressDeadlineSeconds)"
    )
    return Deadline(limit - stalled, "attempt", "ProgressDeadlineExceeded", text)


def _completion(s: JobState) -> Deadline | None:
    if s.attempt.phase != RUNNING or not s.succeeded_nodes:
        return None
    if s.job.spec.success_policy == "NodeZero":
        return None  # node 0 may go on when the others have ended, and its end is that of the job
    # Doubled after each failure in a row for this reason: a long upload at the end of the training must end no job.
    reasons = [failure.reason for failure in reversed(s.earlier_failures)]
    in_row = next((n for n, reason in enumerate(reasons) if reason != COMPLETION_EXCEEDED), len(reasons))
    limit = s.job.spec.completion_grace_seconds * min(2**in_row, _LONGEST_COMPLETION)
    # The plan that sees the first success also sets the timer: no event follows if the other nodes hang.
    waited = seconds_between(s.attempt.first_success_time or timestamp(s.now), s.now)
    left = [r for r in s.job.node_ranks if r not in s.succeeded_nodes]
    text = (
        f"node_rank {', '.join(map(str, left[:8]))} of attempt {s.attempt.number} still run {limit} s after the first "
        "node succeeded, and after the last progress of rank 0 (completionGraceSeconds)"
    )
    polled, pod = s.observed.progress, s.current.get(0)
    if 0 in left and s.answer is not None and polled.stalled_seconds is not None:
        age = s.answer.age_seconds
        waited = min(waited, polled.stalled_seconds, polled.stalled_seconds if age is None or age < 0 else age)
    is_asked = pod is not None and pod.state == "running" and not pod.deleting and bool(pod.ip)
    has_reported = s.answer is not None or s.attempt.first_step_time is not None
    # One request that failed, or a new operator's first plan, does not show that rank 0 stopped to work.
    awaits_answer = is_asked and has_reported and polled.stalled_seconds is None and polled.problem is None
    remaining = max(limit - waited, UNKNOWN_SECONDS) if 0 in left and awaits_answer else limit - waited
    return Deadline(remaining, "attempt", COMPLETION_EXCEEDED, text)


def _avoided_nodes(s: JobState) -> Deadline | None:
    """No Kubernetes node is left for the pods: a suspected node is better than none."""
    # Also entries whose time has passed since the attempt started: its pods still avoid these nodes.
    nodes = banned(s.before)
    if not nodes or s.attempt.is_closed or s.attempt.all_running_time is not None:
        return None
    if not any(pod.unschedulable is not None for pod in s.current.values()):
        return None
    names = ", ".join(node.node_name for node in nodes)
    text = f"no Kubernetes node is left without {names}: these nodes are used again"
    # While the job's own old pods save, their GPUs may be all that is missing. One text of the scheduler may be cut, or
    # be of a moment in which a node was not ready.
    since = no_other_node_since(s) or s.room_since
    left = UNSCHEDULABLE_SECONDS - (seconds_between(since, s.now) if since else 0.0)
    if others_are_full(s.current.values()):  # a broken node always has room: it would take each job of the cluster
        lasting = [node for node in avoided(s.before, s.now) if node in nodes]
        left = max([left, *(-seconds_since(node.until, s.now) for node in lasting)])
    return Deadline(left, "abandons", NODES_NEEDED, text)


def _refused_start(s: JobState) -> Deadline | None:
    if s.attempt.is_closed or (refused := s.refused_start) is None:
        return None
    limit = REFUSED_SECONDS[refused.reason]
    if s.has_trained:
        one_starts = any(pod.state != "pending" for pod in s.current.values())
        limit = REFUSED_LATER_SECONDS if one_starts else REFUSED_EVERYWHERE_SECONDS
    left = limit - seconds_between(refused.since, s.now)
    # Which of several pods was seen first depends on the order of the events.
    pods = (s.current[node_rank] for node_rank in sorted(s.current))
    first = next(pod for pod in pods if is_refused(pod) and pod.waiting and pod.waiting[0] == refused.reason)
    return Deadline(left, "attempt", refused.reason, "", refused=first)


_TIMERS: tuple[Callable[[JobState], Deadline | None], ...] = (
    _active,
    _startup,
    _progress,
    _completion,
    _avoided_nodes,
    _refused_start,
)
