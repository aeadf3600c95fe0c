"""The recorded attempt: its number, its phase and how it ends.

    Creating ──▶ Running ──▶ Ending ──▶ the next attempt, or the end of the job

Creating: pods are created. Running: all pods existed, so a missing pod is lost. Ending: a pod failed, or the attempt is
to stop. As long as an ending has no verdict, the operator waits for the cause of the failure and deletes nothing. An
ending with a verdict is *closed*: its pods are deleted, and it waits for the next attempt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ddpjob.api.backoff import doubling
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time, seconds_between, seconds_since, timestamp

CREATING, RUNNING, ENDING = "Creating", "Running", "Ending"
SUSPENDED = "Suspended"
"""Verdict of an attempt that a suspension ended."""

SETTLE_SECONDS = 3
"""How long an ending waits for the cause. Peers of a failed rank fail within milliseconds; reports take seconds."""

FIRST_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 600
MAX_BACKOFF_SECONDS = 3600  # of restartPolicy.backoff
PROVISIONAL_SECONDS = 120
"""For how long after a failure the loss of a Kubernetes node can explain it: the control plane takes 50 s to notice."""
DRAIN_MARGIN_SECONDS = 5
"""What a pod takes to stop beyond its grace period."""
MAX_GRACE_SECONDS = 86_400  # of terminationGracePeriodSeconds


@dataclass(frozen=True)
class Attempt:
    """``status.currentAttempt``.

    number: from 1; 0 before the first attempt.
    first_step_time, first_success_time: when the first step was reported, and when the first node succeeded.
    refusals: consecutive attempts, with this one, that were abandoned before all their pods existed.
    creating_since: when the first of these attempts started; None without one.
    failures_in_row: consecutive attempts that failed soon after their start; with this one after its failure.
    verdict, message: why the attempt ended; verdict is None as long as it has not ended or the cause is not known.
    until: when the wait for the cause ends, or after the verdict, when the next attempt starts.
    drain_until: until when the next attempt waits for the pods of this one, which save a checkpoint.
    """

    number: int = 0
    phase: str = CREATING
    start_time: str = ""
    all_running_time: str | None = None
    first_step_time: str | None = None
    first_success_time: str | None = None
    refusals: int = 0
    creating_since: str | None = None
    failures_in_row: int = 0
    verdict: str | None = None
    message: str = ""
    since: str = ""
    until: str | None = None
    drain_until: str | None = None

    @classmethod
    def recorded(cls, status: Mapping[str, Any], now: datetime) -> "Attempt":
        """Return the attempt in a status.

        A status without ``currentAttempt``, written by an earlier release, has only a number. The phase is then
        Creating, which becomes Running at once if all pods exist.
        """
        number = int(status.get("attempt") or 0)
        body = status.get("currentAttempt") or {}
        if not number or body.get("number") != number:
            started = None if "activeSeconds" in status else status.get("startTime")
            return cls(number=number, start_time=started or timestamp(now))
        ending = body.get("ending") or {}
        return cls(
            number=number,
            phase=str(body.get("phase") or CREATING),
            start_time=str(body.get("startTime") or timestamp(now)),
            all_running_time=body.get("allRunningTime"),
            first_step_time=body.get("firstStepTime"),
            first_success_time=body.get("firstSuccessTime"),
            refusals=int(body.get("refusals") or 0),
            creating_since=body.get("creatingSince"),
            failures_in_row=int(body.get("failuresInRow") or 0),
            verdict=ending.get("verdict"),
            message=str(ending.get("message") or ""),
            since=str(ending.get("since") or ""),
            until=ending.get("until"),
            drain_until=ending.get("drainUntil"),
        )

    @property
    def is_closed(self) -> bool:
        """Whether the attempt ended with a verdict, or none has started yet."""
        return self.number == 0 or self.verdict is not None

    @property
    def is_creating(self) -> bool:
        return self.number > 0 and self.phase == CREATING

    @property
    def is_settling(self) -> bool:
        """Whether the attempt ends, and its cause is not known yet."""
        return self.number > 0 and self.phase == ENDING and self.verdict is None

    def waits(self, now: datetime) -> bool:
        """Return whether ``until`` is in the future, but not later than any wait lasts: then a clock was set."""
        return _is_ahead(self.until, now, PROVISIONAL_SECONDS if self.verdict is None else MAX_BACKOFF_SECONDS)

    def drains(self, now: datetime) -> bool:
        """Return whether the pods of the ended attempt may still save a checkpoint."""
        return _is_ahead(self.drain_until, now, MAX_GRACE_SECONDS + DRAIN_MARGIN_SECONDS)

    def seconds_running(self, now: datetime) -> float:
        """Return for how long all pods have run, until the ending began."""
        if self.all_running_time is None:
            return 0.0
        return seconds_between(self.all_running_time, parse_time(self.since) if self.since else now)

    def wire(self) -> Json:
        """Return the value of ``status.currentAttempt``."""
        ending = {
            "verdict": self.verdict,
            "message": self.message,
            "since": self.since,
            "until": self.until,
            "drainUntil": self.drain_until,
        }
        body = {
            "number": self.number,
            "phase": self.phase,
            "startTime": self.start_time,
            "allRunningTime": self.all_running_time,
            "firstStepTime": self.first_step_time,
            "firstSuccessTime": self.first_success_time,
            "refusals": self.refusals,
            "creatingSince": self.creating_since,
            "failuresInRow": self.failures_in_row,
            "ending": {key: value for key, value in ending.items() if value} if self.phase == ENDING else None,
        }
        return {key: value for key, value in body.items() if value}


def _is_ahead(time: str | None, now: datetime, longest: float) -> bool:
    return time is not None and 0 < -seconds_since(time, now) <= longest + 1


def retry_seconds(refusals: int) -> float:
    """Return the delay after this many refusals in a row: 1, 2, 4, … 600 s."""
    return doubling(FIRST_RETRY_SECONDS, refusals, MAX_RETRY_SECONDS)


def retry_time(refusals: int, now: datetime) -> str:
    """Return when to create pods again after this many refusals in a row."""
    return whole_second_after(now, retry_seconds(refusals))


def whole_second_after(now: datetime, seconds: float) -> str:
    """Return the first whole second that is at least ``seconds`` after ``now``."""
    return timestamp(now + timedelta(seconds=seconds, microseconds=999_999))
