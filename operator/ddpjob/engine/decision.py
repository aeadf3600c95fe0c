"""What to do about a situation: the one place where an attempt begins, ends, restarts or the job finishes.

The order of the questions is the order of their weight: a finished training is finished even if it should now be
suspended, and a deadline that has passed leaves no room for another restart.
"""

from dataclasses import dataclass
from typing import Literal

from ddpjob.api.wire import Json, timestamp
from ddpjob.engine.failures import failed_pods, failure_record, failure_text, root_cause
from ddpjob.engine.state import JobState

Kind = Literal["go_on", "start", "restart", "suspend", "succeed", "fail", "hold"]


@dataclass(frozen=True)
class Decision:
    """One decision, with the reason and message that status and event give for it.

    hold: nothing may be started, restarted or deleted, because what is there cannot be judged.
    """

    kind: Kind
    reason: str = ""
    message: str = ""
    failure: Json | None = None

    @property
    def begins_attempt(self) -> bool:
        """Whether a new attempt follows from it."""
        return self.kind in ("start", "restart")

    @property
    def is_final_or_destructive(self) -> bool:
        """Whether it must rest on a live LIST, not on a cache that may be stale."""
        return self.kind in ("restart", "suspend", "succeed", "fail")


def decide(s: JobState) -> Decision:
    """The decision for an unfinished job."""
    spec = s.job.spec
    if s.newest_attempt > s.attempt > 0:
        # Either the job we look at is stale, and then writing this fails and it is read anew, or a label was changed.
        newest = max(s.pods, key=lambda pod: pod.attempt)
        return Decision(
            "hold",
            "UnknownAttempt",
            f"pod {newest.name} says it is of attempt {newest.attempt}, but only {s.attempt} were begun: delete that "
            "pod if its labels were changed by hand",
        )
    if s.attempt > 0 and s.all_succeeded:
        return Decision(
            "succeed", "AllNodesSucceeded", f"all {spec.num_nodes} node(s) of attempt {s.attempt} succeeded"
        )
    if spec.suspend:
        return Decision("go_on") if s.suspended else Decision("suspend", "Suspended", "spec.suspend is true")
    if spec.active_deadline_seconds is not None and s.active_seconds >= spec.active_deadline_seconds:
        return Decision(
            "fail",
            "DeadlineExceeded",
            f"active for {int(s.active_seconds)} s, activeDeadlineSeconds is {spec.active_deadline_seconds}: raise it, "
            "or train fewer epochs; the checkpoints stay",
        )
    if s.spec_changed:
        return Decision(
            "hold",
            "SpecChanged",
            "a part of spec.template changed that must stay as it was; the running attempt goes on, but no new one "
            "starts: undo the change, or delete the job and apply it again",
        )
    if s.attempt == 0:
        return Decision("start", "Started", f"attempt {1 + s.newest_attempt} begins")
    if s.suspended:
        return Decision("start", "Resumed", f"resumed after suspension: attempt {s.attempt + 1} begins")
    return _judge_attempt(s)


def _judge_attempt(s: JobState) -> Decision:
    # Until the gang was complete, a pod that goes away is one we took back (quota) or make again: no failure.
    failed = [pod for pod in failed_pods(list(s.current.values())) if s.gang_was_complete or not pod.deleting]
    failed = [pod for pod in failed if pod.node_rank not in s.succeeded_ranks]
    lost = s.missing_ranks if s.gang_was_complete else []
    if not failed and not lost:
        return Decision("go_on")
    spent = int(s.before.get("restartsCountedTowardsLimit") or 0)
    limit = s.job.spec.restart_policy.max_restarts
    action = "Restart" if spent < limit else "Fail"
    culprit = root_cause(failed) if failed else None
    lost_rank = None if culprit else lost[0]
    record = failure_record(s.attempt, culprit, lost_rank, time=timestamp(s.now), action=action)
    if action == "Fail":
        message = f"attempt {s.attempt} failed and all {limit} restarts are spent: {failure_text(record)}"
        return Decision("fail", "MaxRestartsExceeded" if limit else record["reason"], message, record)
    message = f"attempt {s.attempt} failed (restart {spent + 1} of {limit} follows): {failure_text(record)}"
    return Decision("restart", record["reason"], message, record)
