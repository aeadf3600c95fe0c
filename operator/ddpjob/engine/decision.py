"""Decide whether an attempt starts or ends, whether the group restarts, and whether the job finishes.

``decide`` tests the most important rule first: a training that succeeded is not suspended, and a job whose deadline
has passed is not restarted.
"""

from dataclasses import dataclass
from typing import Literal

from ddpjob.api.wire import Json, timestamp
from ddpjob.engine.failures import failed_pods, failure_record, failure_text, root_cause
from ddpjob.engine.state import JobState

Kind = Literal["continue", "start", "restart", "suspend", "succeed", "fail", "hold"]


@dataclass(frozen=True)
class Decision:
    """One decision, with the reason and message for status and event.

    kind "hold": start, restart and delete nothing, because the state of the pods is ambiguous.
    """

    kind: Kind
    reason: str = ""
    message: str = ""
    failure: Json | None = None

    @property
    def begins_attempt(self) -> bool:
        """Whether a new attempt starts."""
        return self.kind in ("start", "restart")

    @property
    def is_final_or_destructive(self) -> bool:
        """Whether the decision requires pods from a LIST instead of from the cache, which may be stale."""
        return self.kind in ("restart", "suspend", "succeed", "fail")


def decide(s: JobState) -> Decision:
    """Return the decision for an unfinished job."""
    spec = s.job.spec
    if s.newest_attempt > s.attempt > 0:
        # The cached job may be stale; then this write conflicts and the job is read again. Or a label was changed.
        newest = max(s.pods, key=lambda pod: pod.attempt)
        return Decision(
            "hold",
            "UnknownAttempt",
            f"pod {newest.name} has the label of attempt {newest.attempt}, but the last attempt is {s.attempt}: delete "
            "the pod if its labels were changed by hand",
        )
    if s.attempt > 0 and s.all_succeeded:
        return Decision(
            "succeed", "AllNodesSucceeded", f"all {len(s.job.node_ranks)} node(s) of attempt {s.attempt} succeeded"
        )
    if spec.suspend:
        return Decision("continue") if s.suspended else Decision("suspend", "Suspended", "spec.suspend is true")
    if spec.active_deadline_seconds is not None and s.active_seconds >= spec.active_deadline_seconds:
        return Decision(
            "fail",
            "DeadlineExceeded",
            f"active for {int(s.active_seconds)} s, activeDeadlineSeconds is {spec.active_deadline_seconds}: increase "
            "it, or train fewer epochs; the checkpoints are kept",
        )
    if s.spec_changed:
        return Decision(
            "hold",
            "SpecChanged",
            "an immutable part of spec.template was changed; the running attempt continues, but no new attempt starts: "
            "undo the change, or delete the job and apply it again",
        )
    if s.attempt == 0:
        return Decision("start", "Started", f"attempt {1 + s.newest_attempt} starts")
    if s.suspended:
        return Decision("start", "Resumed", f"resumed after suspension: attempt {s.attempt + 1} starts")
    return _judge_attempt(s)


def _judge_attempt(s: JobState) -> Decision:
    # Before the gang was complete, a pod being deleted is one that the operator took back (quota) or creates again.
    failed = [pod for pod in failed_pods(list(s.current.values())) if s.gang_was_complete or not pod.deleting]
    failed = [pod for pod in failed if pod.node_rank not in s.succeeded_node_ranks]
    lost = s.missing_node_ranks if s.gang_was_complete else []
    if not failed and not lost:
        return Decision("continue")
    used = int(s.before.get("restartsCountedTowardsLimit") or 0)
    limit = s.job.spec.restart_policy.max_restarts
    action = "Restart" if used < limit else "Fail"
    failed_first = root_cause(failed) if failed else None
    lost_first = None if failed_first else lost[0]
    record = failure_record(s.attempt, failed_first, lost_first, time=timestamp(s.now), action=action)
    if action == "Fail":
        message = f"attempt {s.attempt} failed and all {limit} restarts are used: {failure_text(record)}"
        return Decision("fail", "MaxRestartsExceeded" if limit else record["reason"], message, record)
    message = f"attempt {s.attempt} failed (restart {used + 1} of {limit} follows): {failure_text(record)}"
    return Decision("restart", record["reason"], message, record)
