"""How many restarts a job has left, how long the next one waits, and when a restart stops to count.

The numbers are in the status and are never derived from pods. Progress sets them back: with the defaults, a job that
has trained survives an outage of more than half an hour in which each attempt fails after 20 s, for each new outage.
"""

from collections.abc import Sequence

from ddpjob.api.backoff import doubling, jittered
from ddpjob.api.pod_view import PodView
from ddpjob.api.restarts import Backoff
from ddpjob.api.status import LONG_RUN_SECONDS, DDPJobStatus, Ending, Failure
from ddpjob.api.times import seconds_since
from ddpjob.engine.attempt import PROVISIONAL_SECONDS, seconds_running
from ddpjob.engine.evidence import evidence_of, is_on_lost_node
from ddpjob.engine.failures import Context, Judgement
from ddpjob.engine.judgement import judge
from ddpjob.engine.progress import furthest
from ddpjob.engine.raised import is_of_a_service
from ddpjob.engine.state import RUN_SECONDS, JobState


def made_progress(s: JobState, if_unknown: int = RUN_SECONDS) -> bool:
    """Return whether the job has got further since its last failure.

    A step or checkpoint that an attempt before had reached, is no progress.

    Args:
        if_unknown: seconds after which the attempt of a program that reports neither has made progress.
    """
    if s.attempt.is_closed:  # its end has been counted
        return False
    reached, attempt = furthest(s.report, s.before.furthest, 0), s.attempt
    if reached is not None and not reached.trained:
        return not reached.restarts_since
    if attempt.first_success_time is not None and s.job.spec.success_policy == "AllNodes":
        # Then it only waits for the other nodes, with the doubled completionGraceSeconds for more than an hour.
        attempt = attempt.changed(ending=Ending(since=attempt.first_success_time))
    return seconds_running(attempt, s.now) >= if_unknown


def exhausted(s: JobState, judgement: Judgement) -> tuple[str, str] | None:
    """Return why no restart may follow the current attempt, as the reason of the job's end and a text; or None."""
    if judgement.counted and counted_restarts(s) >= (most := max_restarts(s, judgement)):
        if most:
            return "MaxRestartsExceeded", f"all {most} restarts are used"
        return judgement.reason, "maxRestarts allows no restart"
    total = s.job.spec.restart_policy.max_total_restarts
    # An administrator may drain hundreds of nodes.
    if total_restarts(s) < total or (judgement.is_free and total):
        return None
    return "MaxTotalRestartsExceeded", f"all {total} restarts (maxTotalRestarts) are used"


def max_restarts(s: JobState, judgement: Judgement) -> int:
    """Return the limit of the restarts that count.

    A service may also be away when a job begins. In local mode a person is near, and no other node may help.
    """
    found = judgement.evidence
    errors = [(found.facts.exception, judgement.message)] if found else []
    errors += [(failure.exception, failure.message) for failure in s.earlier_failures]
    has_outage = any(is_of_a_service(*error) for error in errors)
    may_last = (s.has_trained or has_outage) and not s.settings.is_local
    return s.job.spec.restart_policy.limit(has_trained=may_last)


def counted_restarts(s: JobState) -> int:
    """Return how many restarts up to the current attempt count towards maxRestarts."""
    return 0 if made_progress(s) else refund(s).restarts_counted_towards_limit or 0


def total_restarts(s: JobState) -> int:
    """Return how many restarts up to the current attempt count towards maxTotalRestarts.

    A program that saves a step and fails, again and again within a minute, would restart without end.
    """
    used = (s.before.restarts_counted_towards_total or 0) + s.new_lives
    if not used or seconds_running(s.attempt, s.now) < RUN_SECONDS:
        return used
    return 0 if made_progress(s, LONG_RUN_SECONDS) else used


def failures_in_row(s: JobState, *, is_free: bool) -> int:
    """Return how many attempts in a row failed, with the current one."""
    _, longest = _backoff(s).first_and_longest
    ends = made_progress(s) or (is_free and seconds_running(s.attempt, s.now) > longest)
    return 1 if ends else (s.attempt.failures_in_row or 0) + 1


def reasons_since_progress(s: JobState) -> frozenset[str]:
    """Return the reasons of the recorded failures since the last progress."""
    failures = s.earlier_failures
    first = _first_in_counter(failures, s.before.restarts_counted_towards_limit or 0)
    return frozenset(() if made_progress(s, LONG_RUN_SECONDS) else (failure.reason for failure in failures[first:]))


def _backoff(s: JobState) -> Backoff:
    return s.job.spec.restart_policy.backoff or Backoff()


def seconds_to_next(s: JobState, *, is_free: bool) -> float:
    """Return the delay before the restart after the current attempt. is_free: the restart counts towards no limit."""
    return restart_delay(_backoff(s), failures_in_row(s, is_free=is_free), f"{s.job.uid}/{s.attempt.number}")


def restart_delay(backoff: Backoff, in_row: int, key: str) -> float:
    """Return the seconds before the restart after this many failures in a row: 0, then 10, 20, 40, ... with jitter."""
    if in_row <= 1:
        return 0.0
    first, longest = backoff.first_and_longest
    return jittered(doubling(first, in_row - 1, longest), key)


def refund(s: JobState) -> DDPJobStatus:
    """Return the recorded status, without the cost of restarts whose Kubernetes nodes proved lost.

    When a node fails, its peers report first: they lost a connection. The control plane notices the loss 50 s later,
    and the next attempt may have lost another node by then: each failure of the last 120 s may be refunded.
    """
    failures = list(s.before.failures or ())
    used = s.before.restarts_counted_towards_limit or 0
    refunded = 0
    for index in range(_first_in_counter(failures, used), len(failures)):
        failure = failures[index]
        recent = 0 <= seconds_since(failure.time, s.now) <= PROVISIONAL_SECONDS
        if not (recent and failure.provisional and failure.counted):
            continue
        # A pod whose lost Kubernetes node explains the failure.
        pods, here = (pod for pod in s.pods if is_on_lost_node(pod)), failure.node_name or ""
        if lost := next((pod for pod in pods if pod.attempt == failure.attempt or pod.node_name == here), None):
            failures[index] = _refunded(s, failure, lost)
            refunded += 1
    if not refunded:
        return s.before
    return s.before.changed(failures=failures, restarts_counted_towards_limit=max(used - refunded, 0))


def _first_in_counter(failures: Sequence[Failure], used: int) -> int:
    """Return the index of the first failure whose restart the counter contains: a reset removes earlier ones."""
    counted = [index for index, failure in enumerate(failures) if failure.counted]
    return counted[max(len(counted) - used, 0)] if counted and used else len(failures)


def _refunded(s: JobState, failure: Failure, lost: PodView) -> Failure:
    """Return the failure as one that does not count; it names the lost pod instead of the peer that reported first."""
    if lost.attempt == failure.attempt and lost.name != failure.pod:
        failure = failure.changed(
            # What only the peer reported about itself goes.
            **dict.fromkeys(("rank", "exit_code", "signal", "exception", "log_tail")),
            node_rank=lost.node_rank,
            pod=lost.name,
            node_name=lost.node_name,
        )
    verdict = judge(evidence_of(lost), Context(), s.logs_command(lost.node_rank, lost.attempt))
    return failure.changed(
        **verdict.advice,
        reason=verdict.reason,
        message=f"{failure.message}; Kubernetes node {lost.node_name} proved lost, so the restart does not count",
        counted=False,
        provisional=None,
    )
