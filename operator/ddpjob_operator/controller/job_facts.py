"""What the metrics say about a job, kept beside its encoded form, so that a scrape decodes no job.

A tenant or a program may spoil a status: each value is read by itself, a wrong one counts as absent, and no time is
before the creation of the job, which the API server sets.
"""

from collections.abc import Mapping
from sys import intern
from typing import Any, NamedTuple

from ddpjob.api.objects import Json
from ddpjob.api.time_spent import TIME_CATEGORIES, is_time
from ddpjob.api.times import parse_time
from ddpjob.engine.obstacles import SLOW_ADVICE
from ddpjob.engine.scheduling import kueue

_STATES = frozenset(
    ("New", "Queued", "Pending", "Running", "Ending", "Restarting", "Suspended", "Succeeded", "Failed", "Invalid")
)
_QUEUES = {kueue.WAITING: "quota", kueue.QUEUE_UNAVAILABLE: "queue", kueue.DEACTIVATED: "queue"}
"""What a job waits for, by the reason of its condition Reconciling; by any other reason for its pods."""
_MAX_COUNT = 10**12


class JobFacts(NamedTuple):
    """Of one job. Times are seconds since 1970; what is not known, or does not apply, is None or empty.

    state: status.state; Other for a word of no release, as of ``slow``, the part of status.slow.
    stalled: "training" if its ranks make no steps, "job" if it cannot continue without a change by its user.
    waits_for, waits_since: "pods", "quota", or "queue" if its queue cannot admit it.
    saved: since when its attempt trains without a new checkpoint, if it has reported one.
    restarts: without progress.
    training, used: seconds until ``as_of``, as in ``TimeSpent.goodput``; ``current``: the category since then.
    """

    state: str
    slow: str = ""
    stalled: str = ""
    waits_for: str = ""
    waits_since: float = 0.0
    saved: float | None = None
    restarts: int = 0
    step: int | None = None
    training: int = 0
    used: int = 0
    current: str = ""
    as_of: float = 0.0

    def goodput(self, now: float) -> float | None:
        """Return ``TimeSpent.goodput`` as it is now."""
        more = max(now - self.as_of, 0.0) if self.current not in ("", "queued", "stopped") else 0.0
        used = self.used + more
        return (self.training + more * (self.current == "training")) / used if used else None


def facts_of(job: Json) -> JobFacts:
    """Return the facts about a job."""
    status, created = _object(job.get("status")), creation(job)
    state, slow = _known(status.get("state") or "New", _STATES), status.get("slow")
    found: Json = {"state": state, "step": _count(_object(status.get("progress")).get("step"))}
    if isinstance(slow, dict):
        found["slow"] = _known(slow.get("part"), SLOW_ADVICE)
    if (spent := seconds_by_category(status, created)) is not None:
        current, as_of = status["time"].get("current"), _time(status["time"]["asOf"])
        used = sum(spent.values()) - spent["queued"] - spent["stopped"]
        found |= {"training": spent["training"], "used": used, "as_of": as_of}
        found["current"] = current if current in TIME_CATEGORIES else ""
    if created is not None and state != "Failed":
        found |= _troubles(state, status, created)
    return JobFacts(**found)


def seconds_by_category(status: Mapping[str, Any], created: float | None) -> dict[str, int] | None:
    """Return the seconds of ``status.time``; None if it is spoiled, as with more seconds than the job is old."""
    time = _object(status.get("time"))
    as_of = _time(time.get("asOf"))
    found = {category: count for category in TIME_CATEGORIES if (count := _count(time.get(category, 0))) is not None}
    if as_of is None or created is None or len(found) < len(TIME_CATEGORIES):
        return None
    return found if sum(found.values()) <= as_of - created else None


def creation(job: Json) -> float | None:
    """Return when a job was created."""
    return _time(job["metadata"].get("creationTimestamp"))


def _troubles(state: str, status: Json, created: float) -> Json:
    """Return what an administrator may have to look at, of a job that has not failed."""
    found: Json = {}
    attempt, conditions = _object(status.get("currentAttempt")), status.get("conditions")
    listed = conditions if isinstance(conditions, list) else []
    true = {str(each.get("type")): each for each in listed if isinstance(each, dict) and each.get("status") == "True"}
    if state == "Running" and isinstance(status.get("stall"), dict):
        found["stalled"] = "training"
    elif "Stalled" in true:
        found["stalled"] = "job"
    elif (waits := true.get("Reconciling")) is not None:
        ended = _object(attempt.get("ending")).get("since")
        begun = attempt.get("creatingSince") or ended or attempt.get("startTime")
        found["waits_for"] = _QUEUES.get(str(waits.get("reason")), "pods")
        # Also from the start of an attempt: before, the job may have waited for its quota.
        found["waits_since"] = _latest(created, waits.get("lastTransitionTime"), begun)
    saved = _object(status.get("checkpoint")).get("time")
    if state == "Running" and _time(saved) is not None:
        found["saved"] = _latest(created, saved, attempt.get("firstStepTime"), attempt.get("allRunningTime"))
    if state not in ("Succeeded", "Suspended"):
        found["restarts"] = _count(_object(status.get("furthest")).get("restartsSince")) or 0
    return found


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _known(word: Any, words: Any) -> str:
    return intern(word) if isinstance(word, str) and word in words else "Other"


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


def _time(value: Any) -> float | None:
    return parse_time(value).timestamp() if isinstance(value, str) and is_time(value) else None


def _latest(created: float, *times: Any) -> float:
    return max((created, *(time for each in times if (time := _time(each)) is not None)))
