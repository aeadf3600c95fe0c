"""Times of a status, and where the time of a job went."""

import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated, Self

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ddpjob.api.model import StatusPart
from ddpjob.api.times import parse_time, seconds_between, timestamp

_MAX_TIME = 64
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def is_time(value: str) -> bool:
    """Return whether a text is a time of RFC 3339 with seconds: the format ``date-time`` of the API server."""
    return len(value) <= _MAX_TIME and _is_time(value)


@lru_cache(maxsize=1024)  # each plan reads the same dozen times
def _is_time(value: str) -> bool:
    if not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        return False
    return True


def _time(value: str) -> str:
    if not is_time(value):
        raise PydanticCustomError("time_type", "must be a time of RFC 3339, for example 2026-03-01T12:00:00Z")
    return value


Time = Annotated[str, AfterValidator(_time), Field(json_schema_extra={"format": "date-time"})]
Count = Annotated[int, Field(ge=0)]
"""A number that decisions read. The CRD accepts any, so that a release with other limits can be mixed with this one."""
TIME_CATEGORIES = ("queued", "scheduling", "starting", "training", "stalled", "saving", "lost", "recovering", "stopped")


class TimeSpent(StatusPart):
    """Where the time of the job went, in whole seconds: each second from its creation to `asOf` is in one category."""

    as_of: Time
    """Up to when the time is counted. It is not written for the time alone, so it may be long ago."""
    current: str | None = None
    """Category of the time since `asOf`; absent after the end of the job."""
    queued: Count = 0
    """Before the first attempt, and between attempts whose pods could not be created."""
    scheduling: Count = 0
    """From the start of the first attempt, or of the first after a suspension, until all its pods ran."""
    starting: Count = 0
    """From then until its first step. Without reports of steps, the training begins when all pods run."""
    training: Count = 0
    """Training of steps for the first time."""
    stalled: Count = 0
    """Pauses as in `status.pause`, beyond the time of a few steps."""
    saving: Count = 0
    """Saves of checkpoints that blocked the training, as rank 0 reports them."""
    lost: Count = 0
    """Training of steps again that an attempt or a life before had trained."""
    recovering: Count = 0
    """From a failure, a lost node or a requested restart until the next step."""
    stopped: Count = 0
    """Suspended."""
    furthest_step: Count | None = None
    """The furthest step that was reported. Training of earlier steps is lost time."""

    @property
    def total(self) -> int:
        """Seconds in all categories."""
        return sum(self.by_category.values())

    @property
    def by_category(self) -> dict[str, int]:
        """Seconds by category, in the order of ``TIME_CATEGORIES``."""
        return {name: getattr(self, name) for name in TIME_CATEGORIES}

    @property
    def goodput(self) -> float | None:
        """training / (total - queued - stopped): the share of the time with pods that was progress; None before."""
        used = self.total - self.queued - self.stopped
        return self.training / used if used else None

    def at(self, now: datetime) -> Self:
        """Return the ledger as it is now; an earlier time than ``as_of`` changes nothing."""
        seconds = int(seconds_between(self.as_of, now))
        if self.current not in TIME_CATEGORIES or not seconds:
            return self
        as_of = timestamp(parse_time(self.as_of) + timedelta(seconds=seconds))
        return self.changed(as_of=as_of, **{self.current: getattr(self, self.current) + seconds})
