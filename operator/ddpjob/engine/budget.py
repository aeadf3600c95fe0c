"""How many restarts a job has left, how long the next one waits, and when a restart stops to count.

The numbers are in the status and are never derived from pods.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.api.backoff import doubling
from ddpjob.api.objects import Json
from ddpjob.api.spec import Backoff
from ddpjob.api.times import seconds_since
from ddpjob.engine.attempt import PROVISIONAL_SECONDS
from ddpjob.engine.evidence import evidence_of, is_on_lost_node
from ddpjob.engine.failures import judge
from ddpjob.engine.pod_view import PodView
from ddpjob.engine.state import JobState

# Fields of a failure about the process that reported it, which only lost a peer on the lost node.
_OF_THE_REPORTER = frozenset({"rank", "exitCode", "signal", "exception", "logTail"})


@dataclass(frozen=True)
class Spending:
    """What one more restart costs.

    exceeded: the limit that does not allow it, "maxRestarts" or "maxTotalRestarts", or None.
    restarts, counted: numbers with this restart: of all restarts, and of those that count.
    in_row: failures in a row with this one.
    delay: seconds before the next attempt.
    """

    exceeded: str | None
    restarts: int
    counted: int
    in_row: int
    delay: float


def spend(s: JobState, *, counted: bool) -> Spending:
    """Return what a restart after the current attempt costs."""
    policy = s.job.spec.restart_policy
    restarts = int(s.before.get("restarts") or 0)
    used = int((dict(s.before) | refund(s)).get("restartsCountedTowardsLimit") or 0)
    ran = s.attempt.seconds_running(s.now)
    if policy.reset_after_seconds is not None and ran >= policy.reset_after_seconds:
        used = 0
    exceeded = None
    if counted and used >= policy.max_restarts:
        exceeded = "maxRestarts"
    elif restarts >= policy.max_total_restarts:
        exceeded = "maxTotalRestarts"
    in_row = 1 if s.attempt.all_running_time and ran > policy.backoff.max_seconds else s.attempt.failures_in_row + 1
    delay = restart_delay(policy.backoff, in_row, f"{s.job.uid}/{s.attempt.number}")
    return Spending(exceeded, restarts + 1, used + counted, in_row, delay)


def restart_delay(backoff: Backoff, in_row: int, key: str) -> float:
    """Return the seconds before the restart after this many failures in a row: 0, then 1, 2, 4, ... with jitter.

    The jitter takes off up to a quarter, so that jobs that fail together do not restart together. It is drawn from
    ``key`` and so the same in every plan of this restart.
    """
    if in_row <= 1:
        return 0.0
    longest = doubling(backoff.initial_seconds, in_row - 1, backoff.max_seconds)
    drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32
    return longest * (1 - drawn / 4)


def refund(s: JobState) -> Json:
    """Return the changed status fields if restarts no longer count, because their Kubernetes nodes proved lost.

    When a node fails, its peers report first: they lost a connection. The control plane notices the loss 50 s later,
    and the next attempt may have lost another node by then: each failure of the last 120 s may be refunded.
    """
    failures = list(s.before.get("failures") or ())
    used = int(s.before.get("restartsCountedTowardsLimit") or 0)
    refunded = 0
    for index in range(_first_in_counter(failures, used), len(failures)):
        failure = failures[index]
        if _is_refundable(failure, s) and (lost := _lost_pod(s, failure)) is not None:
            failures[index] = _refunded(s, failure, lost)
            refunded += 1
    if not refunded:
        return {}
    return {"failures": failures, "restartsCountedTowardsLimit": max(used - refunded, 0)}


def _first_in_counter(failures: Sequence[Mapping[str, Any]], used: int) -> int:
    """Return the index of the first failure whose restart the counter contains: a reset removes earlier ones."""
    counted = [index for index, failure in enumerate(failures) if failure.get("counted")]
    return counted[max(len(counted) - used, 0)] if counted and used else len(failures)


def _lost_pod(s: JobState, failure: Mapping[str, Any]) -> PodView | None:
    """Return a pod whose lost Kubernetes node explains the failure."""
    return next((pod for pod in s.pods if is_on_lost_node(pod) and _explains(pod, failure)), None)


def _refunded(s: JobState, failure: Mapping[str, Any], lost: PodView) -> Json:
    """Return the failure as one that does not count; it names the lost pod instead of the peer that reported first."""
    text = f"{failure['message']}; Kubernetes node {lost.node_name} proved lost, so the restart does not count"
    entry = {k: v for k, v in failure.items() if k != "provisional"}
    if lost.attempt == failure["attempt"] and lost.name != failure.get("pod"):
        entry = {k: v for k, v in entry.items() if k not in _OF_THE_REPORTER}
        entry |= {"nodeRank": lost.node_rank, "pod": lost.name, "nodeName": str(lost.node_name)}
    verdict = judge(evidence_of(lost), (), s.job.name)
    entry |= {"reason": verdict.reason, "message": text, "hint": verdict.hint, "next": verdict.next, "counted": False}
    return entry


def _is_refundable(failure: Mapping[str, Any], s: JobState) -> bool:
    recent = 0 <= seconds_since(failure["time"], s.now) <= PROVISIONAL_SECONDS
    return recent and bool(failure.get("provisional")) and bool(failure.get("counted"))


def _explains(lost: PodView, failure: Mapping[str, Any]) -> bool:
    is_same_node = lost.node_name is not None and lost.node_name == failure.get("nodeName")
    return lost.attempt == failure["attempt"] or is_same_node
