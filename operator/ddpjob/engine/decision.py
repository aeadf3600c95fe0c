"""Decide whether an attempt starts or ends, whether the group restarts, and whether the job finishes.

``decide`` tests the most important rule first: a training that succeeded is not suspended, and a job whose deadline
has passed is not restarted. A rule returns None if it does not apply.
"""

from dataclasses import dataclass
from typing import Literal

from ddpjob.api import names
from ddpjob.api.wire import Json, timestamp
from ddpjob.engine.actions import DELETE_REFUSED, NAME_TERMINATING
from ddpjob.engine.attempt import RUNNING, SUSPENDED, retry_time
from ddpjob.engine.failures import evidence, failed_pods, failure_record, failure_text, root_cause
from ddpjob.engine.pods import PodView
from ddpjob.engine.state import JobState

Kind = Literal["continue", "start", "created", "settle", "restart", "close", "suspend", "succeed", "fail", "hold"]


@dataclass(frozen=True)
class Decision:
    """One decision, with the reason and message for status and event.

    kind: "created": all pods exist, so from now on a missing pod is lost. "settle": a pod failed, wait for the cause.
        "close": the attempt ends, and the next one starts later. "hold": nothing starts until the spec is corrected.
    refusals: of the attempt that starts or is closed, see ``Attempt``.
    until: when the next attempt starts after "close"; None if that depends on the user.
    """

    kind: Kind
    reason: str = ""
    message: str = ""
    failure: Json | None = None
    refusals: int = 0
    until: str | None = None

    @property
    def begins_attempt(self) -> bool:
        """Whether a new attempt starts."""
        return self.kind in ("start", "restart")

    @property
    def ends_attempt(self) -> bool:
        """Whether the current attempt gets its verdict, and no other starts now."""
        return self.kind in ("close", "suspend", "succeed", "fail")

    @property
    def is_final_or_destructive(self) -> bool:
        """Whether the decision requires pods from a LIST instead of from the cache, which may be stale."""
        return self.ends_attempt or self.kind in ("settle", "restart")


CONTINUE = Decision("continue")


def decide(s: JobState) -> Decision:
    """Return the decision for an unfinished job."""
    for rule in _RULES:
        if (decision := rule(s)) is not None:
            return decision
    return _held(s) if s.spec_changed else CONTINUE


def _success(s: JobState) -> Decision | None:
    if s.attempt.is_closed or not s.all_succeeded:
        return None
    text = f"all {len(s.job.node_ranks)} node(s) of attempt {s.attempt.number} succeeded"
    return Decision("succeed", "AllNodesSucceeded", text)


def _suspension(s: JobState) -> Decision | None:
    if not s.job.spec.suspend:
        return None
    return CONTINUE if s.suspended else Decision("suspend", SUSPENDED, "spec.suspend is true")


def _deadline(s: JobState) -> Decision | None:
    limit = s.job.spec.active_deadline_seconds
    if limit is None or s.attempt.number == 0 or s.active_seconds < limit:
        return None
    text = (
        f"active for {int(s.active_seconds)} s, activeDeadlineSeconds is {limit}: increase it, or train fewer epochs; "
        "the checkpoints are kept"
    )
    return Decision("fail", "DeadlineExceeded", text)


def _first_attempt(s: JobState) -> Decision | None:
    if s.attempt.number:
        return None
    return _held(s) if s.spec_changed else Decision("start", "Started", f"attempt {number_of_next(s)} starts")


def _unknown_attempt(s: JobState) -> Decision | None:
    """A pod of an attempt that the status does not know: the status was restored from a backup, or a label changed.

    If only the cached job is stale, the write of this decision conflicts, and the job is read again.
    """
    if s.attempt.is_closed or s.newest_attempt <= s.attempt.number:
        return None
    newest = max(s.pods, key=lambda pod: pod.attempt)
    known = f"the last recorded attempt is {s.attempt.number}"
    return _abandon(s, "UnknownAttempt", f"pod {newest.name} belongs to attempt {newest.attempt}, but {known}")


def _next_attempt(s: JobState) -> Decision | None:
    """Start the attempt that follows a closed one, when its time has come."""
    if not s.attempt.is_closed:
        return None
    if s.spec_changed:
        return _held(s)
    if s.attempt.waits(s.now) and not s.spec_edited:
        return CONTINUE
    number = number_of_next(s)
    if s.suspended:
        return Decision("start", "Resumed", f"resumed after suspension: attempt {number} starts")
    refusals = 0 if s.spec_edited else s.attempt.refusals
    return Decision("start", "Retried", f"attempt {number} starts", refusals=refusals)


def _completion(s: JobState) -> Decision | None:
    exists = s.all_pods_exist and s.observed.service is not None
    if s.attempt.is_creating and (exists or s.observed.round == "complete"):
        return Decision("created", RUNNING, "all pods exist")
    return None


def _failure(s: JobState) -> Decision | None:
    creating = s.attempt.is_creating
    # While pods are created, one that is being deleted has not trained; ``_creation`` gives the attempt up.
    failed = [pod for pod in failed_pods(s.current.values()) if not (creating and pod.deleting)]
    failed = [pod for pod in failed if pod.node_rank not in s.succeeded_nodes]
    lost = [] if creating else s.missing_nodes
    cause = root_cause(failed) if failed else None
    is_known = bool(lost) or (cause is not None and evidence(cause) == "own")
    if cause is None and not lost:
        return _unconfirmed(s)
    if is_known or creating or s.all_stopped:
        return _verdict(s, cause, lost)
    if not s.attempt.is_settling:
        return Decision("settle", "Failing", _settling_text(s, cause))
    return CONTINUE if s.attempt.waits(s.now) else _verdict(s, cause, lost)


def _unconfirmed(s: JobState) -> Decision | None:
    """No pod shows the failure that an earlier observation showed: the attempt runs on."""
    if not s.attempt.is_settling:
        return None
    return CONTINUE if s.attempt.waits(s.now) else Decision("created", RUNNING, "all pods exist")


def _settling_text(s: JobState, seen: PodView | None) -> str:
    where = seen.where if seen else "a pod"
    return f"attempt {s.attempt.number} failed: {where} ended; waiting for the other nodes to find the cause"


def _verdict(s: JobState, cause: PodView | None, lost: list[int]) -> Decision:
    """Return what follows from the failure. A lost pod precedes one that only perhaps failed by itself."""
    number = s.attempt.number
    if lost and cause is not None and evidence(cause) != "own":
        cause = None
    used = int(s.before.get("restartsCountedTowardsLimit") or 0)
    limit = s.job.spec.restart_policy.max_restarts
    action = "Restart" if used < limit else "Fail"
    lost_node = None if cause else lost[0]
    record = failure_record(number, cause, lost_node, time=timestamp(s.now), action=action)
    if action == "Fail":
        message = f"attempt {number} failed and all {limit} restarts are used: {failure_text(record)}"
        return Decision("fail", "MaxRestartsExceeded" if limit else record["reason"], message, record)
    message = f"attempt {number} failed (restart {used + 1} of {limit} follows): {failure_text(record)}"
    kind: Kind = "close" if s.spec_changed else "restart"
    return Decision(kind, record["reason"], message, record)


def _creation(s: JobState) -> Decision | None:
    """Judge an attempt whose pods are being created. One that cannot be completed is abandoned and costs no restart."""
    if not s.attempt.is_creating:
        return None
    created = [problem for problem in s.observed.problems if problem.reason != DELETE_REFUSED]
    # The next attempt needs the names of Service and claim again: as after a refusal, it waits.
    if refusal := next((p for p in created if p.reason != NAME_TERMINATING or p.resource is not names.PODS), None):
        refusals = s.attempt.refusals + 1
        until = retry_time(refusals, s.now)
        return Decision("close", refusal.reason, refusal.message, refusals=refusals, until=until)
    if created:
        return _abandon(s, NAME_TERMINATING, created[0].message)
    if deleted := next((pod for pod in s.current.values() if pod.deleting), None):
        return _abandon(s, "PodDeleted", f"{deleted.where} was deleted before all pods existed")
    started = next((pod for pod in s.current.values() if pod.state != "pending"), None)
    if started and s.missing_nodes and s.observed.round == "unknown":
        # Perhaps all pods existed, and one was lost while no operator ran. Its peers would not accept a new one.
        missing = f"node_rank {s.missing_nodes[0]} has no pod, but {started.where} has started"
        return _abandon(s, "PodLost", missing)
    if s.spec_changed and s.missing_nodes:
        return _abandon(s, "SpecChanged", "spec.template was changed before all pods existed")
    return None


def _abandon(s: JobState, reason: str, message: str) -> Decision:
    """End the attempt without a restart that counts; the next one starts at once, after the first time with backoff."""
    refusals = s.attempt.refusals + 1
    until = retry_time(refusals - 1, s.now) if refusals > 1 else timestamp(s.now)
    text = f"attempt {s.attempt.number} is abandoned: {message}"
    return Decision("close", reason, text, refusals=refusals, until=until)


def _held(s: JobState) -> Decision:
    runs = (
        "no new attempt starts" if s.attempt.is_closed else "the running attempt continues, but no new attempt starts"
    )
    text = (
        f"an immutable part of spec.template was changed; {runs}: undo the change, or delete the job and apply it again"
    )
    return Decision("hold", "SpecChanged", text)


def number_of_next(s: JobState) -> int:
    """Return the number of the attempt that would start now.

    If a user deleted the status, pods may have a higher number; their names must not be used again. Pods of attempt 1
    are adopted, because they may have been created beside the status that records them: if all run, or none started.
    """
    all_exist = {pod.node_rank for pod in s.pods}.issuperset(s.job.node_ranks)
    usable = all(not (pod.ended or pod.deleting) and (all_exist or pod.state == "pending") for pod in s.pods)
    if s.attempt.number == 0 and s.newest_attempt == 1 and usable:
        return 1
    return max(s.attempt.number, s.newest_attempt) + 1


_RULES = (
    _success,
    _suspension,
    _deadline,
    _first_attempt,
    _unknown_attempt,
    _next_attempt,
    _completion,
    _failure,
    _creation,
)
