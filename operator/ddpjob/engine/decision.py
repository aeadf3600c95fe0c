"""Decide whether an attempt starts or ends, whether the group restarts, and whether the job finishes.

``decide`` tests the most important rule first: a training that succeeded is not suspended, and a job whose deadline
has passed is not restarted. A rule returns None if it does not apply.
"""

from dataclasses import dataclass
from typing import Literal

from ddpjob.api import names
from ddpjob.api.exit_codes import RENDEZVOUS
from ddpjob.api.status import RUNNING, Failure, Size
from ddpjob.api.times import parse_time, seconds_since, timestamp
from ddpjob.engine import budget
from ddpjob.engine.actions import CREATE_FAILED, NAME_TERMINATING, REFUSALS_TO_SHOW
from ddpjob.engine.attempt import (
    EVICTED,
    LATE_SECONDS,
    PROVISIONAL_SECONDS,
    SETTLE_SECONDS,
    SUSPENDED,
    retry_seconds,
    waits,
    whole_second_after,
)
from ddpjob.engine.deadlines import deadlines
from ddpjob.engine.evidence import (
    PodEvidence,
    evidence_named_by,
    evidence_of,
    evidence_of_early_end,
    failed_pods,
    may_have_waited,
    obeyed_sigterm,
    root_cause,
    shows_the_same,
    start_contradicts,
    whose_failure,
)
from ddpjob.engine.failures import Context, Judgement
from ddpjob.engine.judgement import failure_record, failure_text, judge, judge_deadline, overrule
from ddpjob.engine.scheduling import adapters as scheduling
from ddpjob.engine.scheduling import elastic, guard, kueue
from ddpjob.engine.state import JobState
from ddpjob.engine.suspects import failed_before
from ddpjob.engine.token import token_is_lost

Kind = Literal["continue", "start", "created", "settle", "restart", "close", "suspend", "succeed", "fail", "hold"]


@dataclass(frozen=True)
class Decision:
    """One decision, with the reason and message for status and event.

    kind: "created": all pods exist, so from now on a missing pod is lost. "settle": a pod failed, wait for the cause.
        "close": the attempt ends, and the next one starts later. "hold": nothing starts until the spec is corrected.
    refusals: of the attempt that starts or is closed, see ``Attempt``.
    gives_back: the attempt is closed because not all its pods have Kubernetes nodes (``scheduling.guard``).
    until: when the next attempt starts after "close", or until when a "settle" waits; None if that depends on the user.
    drain_until: until when the next attempt probably waits for the pods of this one (``JobState.stopping``).
    size: of the next attempt, if it differs (``elastic``).
    is_free: after a planned loss: the restart counts towards no limit.
    """

    kind: Kind
    reason: str = ""
    message: str = ""
    failure: Failure | None = None
    refusals: int = 0
    gives_back: bool = False
    until: str | None = None
    drain_until: str | None = None
    size: Size | None = None
    is_free: bool = False

    @property
    def restarted(self) -> Failure | None:
        """The failure that a restart follows; None if the decision is no restart of a failed attempt."""
        return self.failure if self.failure is not None and self.failure.action == "Restart" else None

    @property
    def begins_attempt(self) -> bool:
        """Whether a new attempt starts."""
        return self.kind in ("start", "restart")

    @property
    def ends_attempt(self) -> bool:
        """Whether the current attempt gets its verdict, and no other starts now."""
        return self.kind in ("close", "suspend", "succeed", "fail")


CONTINUE = Decision("continue")
RESIZED = "Resized"
"""Verdict of an attempt that a new size of the world ended."""
RESTART_REQUESTED = "RestartRequested"
"""Verdict of an attempt that a new spec.restartedAt ended."""


def decide(s: JobState) -> Decision:
    """Return the decision for an unfinished job."""
    for rule in _RULES:
        if (decision := rule(s)) is not None:
            return decision
    return _held(s) if s.spec_changed else CONTINUE


def _success(s: JobState) -> Decision | None:
    if s.job.spec.success_policy == "NodeZero":
        if 0 not in s.succeeded_nodes:
            return None
        return Decision("succeed", "NodeZeroSucceeded", f"node 0 of attempt {s.attempt.number} succeeded")
    if not s.succeeded_nodes.issuperset(s.job.node_ranks):
        return None
    text = f"all {s.job.nodes} node(s) of attempt {s.attempt.number} succeeded"
    return Decision("succeed", "AllNodesSucceeded", text)


def _suspension(s: JobState) -> Decision | None:
    if not s.job.spec.suspend:
        return None
    if s.suspended:
        return CONTINUE
    return Decision("suspend", SUSPENDED, s.suspension[1], drain_until=s.drain_until)


def _resize(s: JobState) -> Decision | None:
    """End an attempt of another size than the spec's.

    The size may change while the job is suspended. A suspension can begin and end before the operator sees it.
    """
    if s.attempt.is_closed or s.spec_changed or not elastic.is_resized(s):
        return None
    text = f"the number of nodes or of their processes changed: attempt {s.attempt.number} saves a checkpoint and ends"
    return Decision("close", RESIZED, text, drain_until=s.drain_until)


def _job_deadline(s: JobState) -> Decision | None:
    passed = next((d for d in deadlines(s) if d.left <= 0 and d.ends == "job"), None)
    return Decision("fail", passed.reason, passed.message) if passed else None


def _restart_request(s: JobState) -> Decision | None:
    """Restart for a new spec.restartedAt, like ``kubectl rollout restart``, after a checkpoint."""
    asked = s.job.spec.restarted_at
    if asked is None or asked == s.before.restarted_at or s.attempt.is_closed:
        return None
    if s.spec_changed:  # no attempt could follow
        return None
    text = f"spec.restartedAt is {asked}: attempt {s.attempt.number} saves a checkpoint and ends"
    return Decision("close", RESTART_REQUESTED, text, drain_until=s.drain_until)


def _attempt_deadline(s: JobState) -> Decision | None:
    passed = next((d for d in deadlines(s) if d.left <= 0 and d.ends != "job"), None)
    if passed is None or s.attempt.is_closed:
        return None
    if passed.ends == "abandons":
        return _abandon(s, passed.reason, passed.message)
    if passed.refused is not None:
        return _react(s, _judged(s, evidence_of(passed.refused)))
    stall = s.answer.stall if s.answer is not None else None
    judgement = judge_deadline(passed.reason, passed.message, s.logs_command(), stall)
    return _react(s, overrule(judgement, s.job.spec.restart_policy.restart_rules or ()))


def _unknown_attempt(s: JobState) -> Decision | None:
    """A pod of an attempt that the status does not know: the status was deleted, or restored from a backup.

    If only the cached job is stale, the write of this decision conflicts, and the job is read again. While a pod of the
    recorded attempt runs, no later attempt exists: then the pod's label was changed, or another program created it.
    """
    if (s.attempt.number and s.attempt.is_closed) or s.newest_attempt <= s.attempt.number:
        return None
    if any(pod.holds_resources for pod in s.current.values()):
        return None
    newest = next(pod for pod in s.pods if pod.attempt == s.newest_attempt)
    known = f"the last recorded attempt is {s.attempt.number}" if s.attempt.number else "the status records no attempt"
    return _abandon(s, "UnknownAttempt", f"pod {newest.name} belongs to attempt {newest.attempt}, but {known}")


def _next_attempt(s: JobState) -> Decision | None:
    number = s.number_of_next
    if not s.attempt.is_closed or number > 1 > s.attempt.number:  # pods without a status are of an unknown attempt
        return None
    if s.spec_changed:
        return _held(s)
    if waits(s.attempt, s.now) and not (s.spec_edited or guard.starts_early(s)):
        return CONTINUE
    if s.stopping or scheduling.wait(s) is not None:
        return CONTINUE
    if not s.attempt.number:
        return Decision("start", "Started", f"attempt {number} starts")
    if s.suspended:
        return Decision("start", "Resumed", f"resumed after suspension: attempt {number} starts")
    refusals = 0 if s.spec_edited else s.attempt.refusals or 0
    return Decision("start", "Retried", f"attempt {number} starts", refusals=refusals)


def _completion(s: JobState) -> Decision | None:
    if s.attempt.is_creating and token_is_lost(s):
        return _abandon(s, "PeersNotCreated", "its pods would not have one token, because another process began it")
    # A pod that is being deleted counts: it may have trained since an operator that was killed created it.
    exists = not s.missing_nodes and s.observed.service is not None
    if s.attempt.is_creating and (exists or s.observed.round == "complete"):
        return Decision("created", RUNNING, "all pods exist")
    return None


def _failure(s: JobState) -> Decision | None:
    creating = s.attempt.is_creating
    # While pods are created, one that is being deleted has not trained; ``_creation`` abandons the attempt.
    failed = [pod for pod in failed_pods(s.current.values()) if not (creating and pod.deleting)]
    failed = [pod for pod in failed if pod.node_rank not in s.succeeded_nodes]
    lost = [] if creating else s.missing_nodes
    cause = root_cause(failed) if failed else None
    if cause is None and not lost:
        return _unconfirmed(s)
    is_follower = cause is not None and obeyed_sigterm(cause)
    is_own = cause is not None and whose_failure(cause) == "own" and not is_follower
    if cause is not None and (is_own or not lost):
        early = evidence_of_early_end(cause, s.succeeded_nodes, s.current)
        found = evidence_named_by(cause, s.current) or early or evidence_of(cause)
    else:  # a lost pod precedes one that only perhaps failed by itself
        found = PodEvidence(lost[0])
    judgement = _judged(s, found)
    if creating and s.missing_nodes and (found.whose != "own" or found.report.code == RENDEZVOUS):
        # The API server does not accept its peers: this pod waited for them, and perhaps ended for no other reason.
        return _abandon(s, "PeersNotCreated", f"{found.where} ended before all pods existed")
    # The pod that got SIGTERM first perhaps reports last, for example from a node that shuts down.
    is_planned = judgement.planned and not is_follower
    if is_planned or is_own or lost or creating or (s.all_stopped and not s.unread_logs):
        return _conclude(s, found, judgement)
    if (until := _settling_until(s, found)) is not None:
        where = cause.where if cause else "a pod"
        text = f"attempt {s.attempt.number} failed: {where} ended; waiting for the other nodes to find the cause"
        return Decision("settle", "Failing", text, until=until)
    # Each process tries each log once, and for a short time: also a process that starts after the end of the wait.
    is_open = waits(s.attempt, s.now) or bool(s.unread_logs)
    return CONTINUE if is_open else _conclude(s, found, judgement)


def _conclude(s: JobState, found: PodEvidence, judgement: Judgement) -> Decision:
    """End the attempt after a failure whose cause is known. It is no failure to wait for pods that were not placed."""
    if judgement.action != "Fail" and may_have_waited(found):
        within = s.job.spec.rendezvous.timeout_seconds if found.report.code == RENDEZVOUS else 0
        if peers := guard.unplaced_peers(s, within):
            if (size := elastic.shrunk(s, gave_up=True)) is not None:
                return _smaller(s, size)
            what = f"{found.where} ended while {len(peers)} of {s.job.nodes} pods waited for Kubernetes nodes"
            return _give_back(s, guard.PEERS_NOT_PLACED, f"{what}, or had just got them")
    return _wait_for_node(s, judgement) or _react(s, judgement)


def _settling_until(s: JobState, found: PodEvidence) -> str | None:
    """Return until when to wait for the cause; None if the recorded wait is long enough.

    It is longer while the pod that failed first may still end, and its log with it: alone, or as a peer names it. So it
    is extended when a log shows that the pods which have ended only lost a peer.
    """
    is_late = (found.whose == "peer" or (found.pod is not None and not found.pod.ended)) and not s.all_stopped
    longest = LATE_SECONDS if is_late else SETTLE_SECONDS
    ending = s.attempt.ending
    if ending is None or not s.attempt.is_settling:
        return whole_second_after(s.now, longest)
    until = whole_second_after(parse_time(ending.since), longest)
    is_longer = ending.until is None or parse_time(until) > parse_time(ending.until)
    return until if is_late and is_longer and seconds_since(until, s.now) < 0 else None


def _judged(s: JobState, evidence: PodEvidence) -> Judgement:
    context = Context(
        earlier=s.earlier_failures,
        repeated=budget.reasons_since_progress(s),
        has_trained=s.has_trained,
        is_proved=s.is_proved,
        starts_elsewhere=any(start_contradicts(pod, evidence) for pod in s.current.values()),
        fails_elsewhere=any(shows_the_same(pod, evidence) for pod in s.current.values()),
        node_failed_before=failed_before(s.earlier_failures, evidence.facts.node_name, s.now),
        is_local=s.settings.is_local,
    )
    judgement = judge(evidence, context, s.logs_command(evidence.node_rank))
    return overrule(judgement, s.job.spec.restart_policy.restart_rules or ())


def _wait_for_node(s: JobState, judgement: Judgement) -> Decision | None:
    """Wait before the job fails, for a Kubernetes node that may be lost: then the restart does not count.

    The wait ends when all pods have ended. Those of the other nodes end by themselves, because they lost a peer.
    """
    if s.all_stopped or s.settings.is_local or judgement.action == "Fail" or not judgement.provisional:
        return None
    if budget.exhausted(s, judgement) is None:
        return None
    ending = s.attempt.ending
    since = ending.since if ending else timestamp(s.now)
    if abs(seconds_since(since, s.now)) >= PROVISIONAL_SECONDS:  # negative after the clock was set back
        return None
    until = whole_second_after(parse_time(since), PROVISIONAL_SECONDS)
    if ending is not None and s.attempt.is_settling and ending.until == until:
        return CONTINUE
    what = f"attempt {s.attempt.number} failed and no restart is left"
    text = f"{what}: waiting up to {PROVISIONAL_SECONDS} s to learn whether a Kubernetes node is lost"
    return Decision("settle", "Failing", text, until=until)


def _unconfirmed(s: JobState) -> Decision | None:
    """No pod shows the failure that an earlier observation showed: the attempt runs on."""
    if not s.attempt.is_settling:
        return None
    return CONTINUE if waits(s.attempt, s.now) else Decision("created", RUNNING, "all pods exist")


def _react(s: JobState, judgement: Judgement) -> Decision:
    """Return the reaction to a failure: a restart as far as the judgement and the budget allow it."""
    number, is_free = s.attempt.number, judgement.is_free
    exceeded = budget.exhausted(s, judgement)
    fails = judgement.action == "Fail" or exceeded is not None
    record = failure_record(
        number,
        judgement,
        time=timestamp(s.now),
        action="Fail" if fails else "Restart",
        counted=judgement.counted and not fails,
        with_log=s.job.spec.log_tail == "Include",
    )
    if judgement.action == "Fail":
        return Decision("fail", record.reason, f"attempt {number} failed: {failure_text(record)}", record)
    if exceeded is not None:
        reason, why = exceeded
        return Decision("fail", reason, f"attempt {number} failed and {why}: {failure_text(record)}", record)
    follows = "a restart follows that does not count"
    if judgement.counted:
        follows = f"restart {budget.counted_restarts(s) + 1} of {budget.max_restarts(s, judgement)} follows"
    message = f"attempt {number} failed ({follows}): {failure_text(record)}"
    drain_until = s.drain_until if judgement.planned or s.may_overwrite else None
    delay = budget.seconds_to_next(s, is_free=is_free)
    if not (s.spec_changed or delay or drain_until) and scheduling.wait(s) is None:
        return Decision("restart", record.reason, message, record, is_free=is_free)
    until = whole_second_after(s.now, delay) if delay else None
    return Decision("close", record.reason, message, record, until=until, drain_until=drain_until, is_free=is_free)


def _eviction(s: JobState) -> Decision | None:
    """End an attempt that has lost its place in the queue, after a checkpoint. A failure before it counts."""
    if s.attempt.is_closed or not (why := kueue.stop(s)):
        return None
    text = f"{why}: attempt {s.attempt.number} saves a checkpoint and ends"
    return Decision("close", EVICTED, text, drain_until=s.drain_until)


def _eviction_between_attempts(s: JobState) -> Decision | None:
    """Record that a job between two attempts lost its place in the queue: from then on no deadline of the job passes.

    The delay before the next attempt and its size stay as they are. A job with a changed template is held instead.
    """
    attempt, ending = s.attempt, s.attempt.ending
    if ending is None or not attempt.is_closed or attempt.verdict in (SUSPENDED, EVICTED) or s.spec_changed:
        return None
    if not (why := kueue.stop(s) or kueue.unavailable(s)):
        return None
    text = f"{why}: the attempt after {attempt.number} waits in the queue"
    return Decision("close", EVICTED, text, until=ending.until, drain_until=ending.drain_until, size=attempt.next_size)


def _shrink(s: JobState) -> Decision | None:
    """End an attempt whose pods did not all get a Kubernetes node in time, for a smaller one that can start."""
    return _smaller(s, size) if (size := elastic.shrunk(s)) is not None else None


def _smaller(s: JobState, size: Size) -> Decision:
    number, limit = s.attempt.number, s.job.spec.placement.partial_gang_seconds
    text = (
        f"not all {s.job.nodes} pods of attempt {number} got a Kubernetes node within {limit} s: the next "
        f"one has {size.nodes} nodes (minNodes is {s.job.spec.min_nodes}), and costs no restart"
    )
    return Decision("close", elastic.NODES_UNAVAILABLE, text, size=size, drain_until=s.drain_until)


def _grow(s: JobState) -> Decision | None:
    if (size := elastic.grown(s)) is None:
        return None
    text = (
        f"there is room for {size.nodes - s.job.nodes} more nodes: attempt {s.attempt.number} saves a "
        f"checkpoint and ends, and the next one has {size.nodes} nodes of {s.job.spec.num_nodes} and costs no restart"
    )
    return Decision("close", elastic.NODES_AVAILABLE, text, size=size, drain_until=s.drain_until)


def _gang(s: JobState) -> Decision | None:
    """Abandon an attempt whose gang scheduler is gone before all pods exist: pods without it are no gang."""
    if not (s.attempt.is_creating and s.missing_nodes) or (wait := scheduling.wait(s)) is None:
        return None
    return _abandon(s, *wait)


def _creation(s: JobState) -> Decision | None:
    """Judge an attempt whose pods are being created. One that cannot be completed is abandoned and costs no restart."""
    if not s.attempt.is_creating:
        return None
    # What failed may succeed when it is sent again: the missing pods are created again with growing delay.
    created = [problem for problem in s.observed.problems if problem.reason not in REFUSALS_TO_SHOW | {CREATE_FAILED}]
    # The next attempt needs the names of Service and claim again: as after a refusal, it waits.
    if refusal := next((p for p in created if p.reason != NAME_TERMINATING or p.resource is not names.PODS), None):
        refusals = (s.attempt.refusals or 0) + 1
        until = whole_second_after(s.now, retry_seconds(refusals))
        return Decision("close", refusal.reason, refusal.message, refusals=refusals, until=until)
    if created:
        return _abandon(s, NAME_TERMINATING, created[0].message)
    if deleted := next((pod for pod in s.current.values() if pod.deleting), None):
        return _abandon(s, "PodDeleted", f"{deleted.where} was deleted before all pods existed")
    if gone := [rank for rank in s.missing_nodes if s.pod_name(rank) in s.observed.created]:
        return _abandon(s, "PodLost", f"the pod of node_rank {gone[0]} is gone before all pods existed")
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
    refusals = (s.attempt.refusals or 0) + 1
    until = whole_second_after(s.now, retry_seconds(refusals - 1)) if refusals > 1 else timestamp(s.now)
    text = f"attempt {s.attempt.number} is abandoned: {message}"
    return Decision("close", reason, text, refusals=refusals, until=until)


def _partial_gang(s: JobState) -> Decision | None:
    """End an attempt that has held only a part of its Kubernetes nodes for too long."""
    left = guard.seconds_left(s)
    return _give_back(s, *guard.verdict(s)) if left is not None and left <= 0 else None


def _give_back(s: JobState, reason: str, message: str) -> Decision:
    """End the attempt without a failure, so that its Kubernetes nodes are free for others for a while."""
    until = whole_second_after(s.now, guard.backoff(s))
    text = f"{message}: attempt {s.attempt.number} gives its nodes back and costs no restart"
    older = "when no older job waits, and " if reason == guard.YIELDED else ""
    text += f"; the next one starts {older}at {until}{' at the latest' if older else ''}"
    return Decision("close", reason, text, gives_back=True, until=until, drain_until=s.drain_until)


def _held(s: JobState) -> Decision:
    runs = "" if s.attempt.is_closed else "the running attempt continues, but "
    what = f"an immutable part of spec.template was changed; {runs}no new attempt starts"
    return Decision("hold", "SpecChanged", f"{what}: undo the change, or delete the job and apply it again")


_RULES = (
    _success,
    _suspension,
    _eviction_between_attempts,
    _job_deadline,
    _next_attempt,
    _unknown_attempt,
    _completion,
    _failure,
    _resize,
    _eviction,
    _attempt_deadline,
    _restart_request,
    _shrink,
    _partial_gang,
    _gang,
    _creation,
    _grow,
)
