"""The phases of an attempt, and how long it waits in them.

    Creating ──▶ Running ──▶ Ending ──▶ the next attempt, or the end of the job

Creating: pods are created. Running: all pods existed, so a missing pod is lost. Ending: a pod failed, or the attempt is
to stop. As long as an ending has no verdict, the operator waits for the cause of the failure and deletes nothing. An
attempt whose ending has a verdict is *closed*: its pods are deleted, and it waits for the next attempt.
"""

import math
from datetime import datetime, timedelta

from ddpjob.api.backoff import doubling
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import CREATING, CurrentAttempt, DDPJobStatus
from ddpjob.api.times import parse_time, seconds_between, seconds_since, timestamp

SUSPENDED = "Suspended"
"""Verdict of an attempt that a suspension ended."""
DELETING = "Deleting"
"""Reason of the condition Suspended of a deleted job that a finalizer keeps."""
EVICTED = "EvictedFromQueue"
"""Verdict of an attempt that lost its place in a queue."""

SETTLE_SECONDS = 3
"""How long an ending waits for the cause. Peers of a failed rank fail within milliseconds; reports take seconds."""
LATE_SECONDS = 10
"""How long it waits while pods only report that they lost a peer: another one failed, and its kubelet reports late."""

FIRST_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 600
MAX_BACKOFF_SECONDS = 3600  # of restartPolicy.backoff
PROVISIONAL_SECONDS = 120
"""For how long after a failure the loss of a Kubernetes node can explain it: the control plane takes 50 s to notice."""
DRAIN_MARGIN_SECONDS = 5
"""What a pod takes to stop beyond its grace period."""
MAX_GRACE_SECONDS = 86_400  # of terminationGracePeriodSeconds


def recorded_attempt(status: DDPJobStatus, now: datetime) -> CurrentAttempt:
    """Return the attempt in a status; its number is 0 before the first attempt.

    Of an attempt that a user has spoiled, only the number is known. The phase is then Creating, which becomes Running
    at once if all pods exist.
    """
    attempt, number = status.current_attempt, status.attempt or 0
    if attempt is not None and attempt.number == number > 0:
        return attempt
    return CurrentAttempt(number=number, phase=CREATING, start_time=timestamp(now))


def waits(attempt: CurrentAttempt, now: datetime) -> bool:
    """Return whether the wait for the cause goes on, or after the verdict, the delay before the next attempt.

    A time further ahead than the longest wait means that a clock was set back: it is ignored.
    """
    longest = PROVISIONAL_SECONDS if attempt.verdict is None else MAX_BACKOFF_SECONDS
    until = attempt.ending.until if attempt.ending else None
    return until is not None and 0 < -seconds_since(until, now) <= longest + 1


def seconds_to_stop(pod: PodView, now: datetime) -> float:
    """Return for how long a trainer that must not run may still write: at least 0, infinite if its pod is not deleted.

    The deadline is the pod's own: an admission webhook may have raised its grace period. A kubelet keeps it although it
    cannot reach the API server, but only if it has seen the deletion. One further ahead than any grace period means
    that a clock was set back: it is ignored.
    """
    if pod.ended:
        return 0.0
    if pod.deletion_deadline is None:
        return math.inf
    left = DRAIN_MARGIN_SECONDS - seconds_since(pod.deletion_deadline, now)
    return left if 0 < left <= MAX_GRACE_SECONDS + DRAIN_MARGIN_SECONDS else 0.0


def seconds_running(attempt: CurrentAttempt, now: datetime) -> float:
    """Return for how long all pods have run, until the ending began."""
    if attempt.all_running_time is None:
        return 0.0
    return seconds_between(attempt.all_running_time, parse_time(attempt.ending.since) if attempt.ending else now)


def retry_seconds(refusals: int) -> float:
    """Return the delay after this many refusals in a row: 1, 2, 4, … 600 s."""
    return doubling(FIRST_RETRY_SECONDS, refusals, MAX_RETRY_SECONDS)


def whole_second_after(now: datetime, seconds: float) -> str:
    """Return the first whole second that is at least ``seconds`` after ``now``."""
    return timestamp(now + timedelta(seconds=seconds, microseconds=999_999))
