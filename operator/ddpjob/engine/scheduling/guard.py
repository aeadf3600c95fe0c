"""Gangs of which only some pods have a Kubernetes node: which job gives its nodes back, and when.

Two jobs that hold a part of the nodes each would wait for each other without end. All jobs are in one order: the higher
priority of the pods first, then the earlier creation, then the uid. A job that has been partial for
``partialGangSeconds`` yields if an elder one is partial, too: it gives its nodes back, and starts again when no elder
job is partial, or after a backoff. The eldest keeps its nodes five times as long: without a rival, nodes that a cluster
autoscaler adds are awaited. One order has no cycles.

A job counts as elder for half an hour in all, until all its pods ran: one that never fits must not keep the jobs of all
tenants from their nodes. And it counts only for jobs that request the same kind of device: others want other nodes.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.backoff import doubling, jittered
from ddpjob.api.objects import Json, value_at
from ddpjob.api.pod_view import PodView
from ddpjob.api.quantities import is_device
from ddpjob.api.status import recorded_status
from ddpjob.api.text import shorten
from ddpjob.api.times import parse_time, remaining, seconds_between
from ddpjob.engine.actions import MAX_TEXT, Obstacle
from ddpjob.engine.attempt import whole_second_after
from ddpjob.engine.state import JobState

PARTIAL = "PartiallyScheduled"
"""Only some pods have a Kubernetes node. As a verdict: for so long that the eldest job gave its nodes back, too."""
YIELDED = "YieldedTo"
"""Verdict of an attempt that gave its nodes back for an elder job."""
PEERS_NOT_PLACED = "PeersNotPlaced"
"""Verdict of an attempt with a pod that ended while it waited for pods without a Kubernetes node."""
VERDICTS = frozenset({PARTIAL, YIELDED, PEERS_NOT_PLACED})
"""An attempt ends with them before all its pods ran, and costs no restart."""

ELDER_SECONDS = 1800
"""For how long a job counts as elder: as long as the eldest keeps its nodes by default, and some more."""
_ELDEST_FACTOR = 5
_NOTICE_SECONDS = 10
"""How long a job is partial before it is shown, and before another yields to it: schedulers place pods one by one."""
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 10, 600
_OURS = (None, names.CONTROLLER)


Rank = tuple[int, str, str]
"""The place of a job in the order: precedence, time of its creation, uid. The eldest has the lowest."""


class Standing(NamedTuple):
    """A job in the order. since: when it became partial; None if it has yielded.

    pool: the kind of device that its pods request, "" without one. left: for how many seconds from then it counts.
    """

    rank: Rank
    since: str | None
    pool: str = ""
    left: int = 0


def standing(job: Json) -> Standing | None:
    """Return the place of a job by its recorded status; None if it is neither partial nor has yielded."""
    meta, status = job["metadata"], job.get("status") or {}
    given = status.get("currentAttempt")
    if not isinstance(given, Mapping) or not given.keys() & {"partialSince", "yields"}:
        return None  # as almost all jobs: the rest takes longer
    attempt = recorded_status({"currentAttempt": given}).current_attempt
    if attempt is None or status.get("state") == "Invalid":
        return None  # of an invalid job nothing is recorded any more
    spec = job.get("spec")  # of a large job it is JSON text (``cluster.job_json``), or missing
    spec = json.loads(spec) if isinstance(spec, str) else spec
    spec = spec if isinstance(spec, Mapping) else {}
    if "completionTime" in status or meta.get("deletionTimestamp") or spec.get("managedBy") not in _OURS:
        return None
    rank = (-(attempt.pod_priority or 0), str(meta.get("creationTimestamp") or ""), meta["uid"])
    if attempt.partial_since is not None and not attempt.is_closed:
        return Standing(rank, attempt.partial_since, _pool(spec), ELDER_SECONDS - (attempt.elder_seconds or 0))
    return Standing(rank, None, _pool(spec)) if attempt.verdict == YIELDED else None


def _pool(spec: Mapping[str, Any]) -> str:
    """Return the kind of device that the pods of a job request, the first of several by name; "" without one."""
    given = value_at(spec, ("template", "spec", "containers"))
    containers = [spec, *(given if isinstance(given, list) else ())]
    amounts = [value_at(each, ("resources", kind)) for each in containers for kind in ("limits", "requests")]
    asked = (item for each in amounts if isinstance(each, dict) for item in each.items())
    return min((name for name, amount in asked if is_device(name) and str(amount) != "0"), default="")


def elder_seconds(s: JobState) -> int | None:
    """Return ``elder_seconds`` of an attempt that ends now."""
    known, since = s.attempt.elder_seconds, s.partial_since
    if since is None or s.observed.elder is not None:
        return known
    return (known or 0) + int(seconds_between(since, s.now))


def seconds_left(s: JobState) -> float | None:
    """Return after how many seconds the job gives its nodes back; None if it is not partial, or keeps them."""
    limit, since = s.job.spec.placement.partial_gang_seconds, s.partial_since
    if since is None or not limit:
        return None
    waited = seconds_between(since, s.now)
    if (elder := s.observed.elder) is None:
        return _ELDEST_FACTOR * limit - waited
    return max(limit - waited, remaining(min(_NOTICE_SECONDS, limit), elder.since, s.now))


def verdict(s: JobState) -> Obstacle:
    """Return the verdict of an attempt that gives its nodes back now, and why."""
    text = f"only {_counted(s)} pods have a Kubernetes node, since {s.partial_since}"
    if s.observed.elder is None:
        return PARTIAL, text
    return YIELDED, f"{text}, and {_elder(s)} waits for nodes, too"


def backoff(s: JobState) -> float:
    """Return the seconds until the attempt after this one, if it gives its nodes back now."""
    longest = doubling(_FIRST_BACKOFF_SECONDS, (s.attempt.yields or 0) + 1, _MAX_BACKOFF_SECONDS)
    return jittered(longest, f"{s.job.uid}/{s.attempt.number}")


def starts_early(s: JobState) -> bool:
    """Return whether the wait for the next attempt is over before its time.

    The attempt yielded, and no elder job is partial any more, or its creates were refused, and there may be room now.
    """
    refused = s.attempt.verdict == "CreateRefused" and s.observed.may_try
    return refused or (s.attempt.verdict == YIELDED and s.observed.elder is None)


def unplaced_peers(s: JobState, within: float) -> list[PodView]:
    """Return the pods that the others wait for because they were placed late, or not at all.

    within: seconds; a pod that does not run yet was placed late if its kubelet accepted it in this time.
    """
    if s.attempt.all_running_time is not None:
        return []
    waiting = [pod for pod in s.current.values() if pod.state == "pending"]
    return [
        pod
        for pod in waiting
        if pod.node_name is None or (pod.start_time is not None and seconds_between(pod.start_time, s.now) < within)
    ]


def obstacle(s: JobState, why: str) -> Obstacle | None:
    """Return that only some pods have a Kubernetes node, and what follows when; None if it is not so, or new.

    why: the scheduler's message about one of the others, or "".
    """
    if (left := _seconds_to_show(s)) is None or left > 0:
        return None
    limit, since = s.job.spec.placement.partial_gang_seconds, parse_time(s.partial_since or "")
    at, last = (whole_second_after(since, factor * limit) for factor in (1, _ELDEST_FACTOR))
    if not limit:
        follows = "they keep their nodes, because partialGangSeconds is 0"
    elif s.observed.elder is not None:
        follows = f"{_elder(s)} waits for nodes, too, so the pods give theirs back at {at}"
    else:
        follows = f"if an older job waits for nodes, too, the pods give theirs back from {at} on, and else at {last}"
    what = f"{_counted(s)} pods have a Kubernetes node since {s.partial_since}"
    what += f" ({shorten(why, MAX_TEXT)})" if why else ""
    return PARTIAL, f"{what}; {follows}: free nodes, or use fewer with numNodes"


def waits(s: JobState) -> list[float | None]:
    """Return the seconds until the job is shown as partial, and until it gives its nodes back; None for never."""
    return [_seconds_to_show(s), seconds_left(s)]


def _seconds_to_show(s: JobState) -> float | None:
    if s.partial_since is None:
        return None
    limit = s.job.spec.placement.partial_gang_seconds
    return min(_NOTICE_SECONDS, limit or _NOTICE_SECONDS) - seconds_between(s.partial_since, s.now)


def _counted(s: JobState) -> str:
    placed = sum(pod.node_name is not None and not pod.ended for pod in s.current.values())
    return f"{placed} of {s.job.nodes}"


def _elder(s: JobState) -> str:
    """Return the elder job as messages name it: tenants must not learn the names of other tenants' jobs."""
    elder = s.observed.elder
    if elder is not None and elder.namespace == s.job.namespace:
        return f"job {elder.name}"
    return "an older job in another namespace"
