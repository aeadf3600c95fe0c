"""What a system that admits a job, or places the pods of an attempt, adds to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Change, Create, Delete
from ddpjob.engine.state import JobState

Obstacle = tuple[str, str]
"""Reason and message."""
MAX_TEXT = 512
"""Characters of a text of a system in a message."""
LOOKUP_SECONDS = 60.0
"""How long an object of the cluster that was read is used, and when one is read again that keeps a job waiting."""
UNAVAILABLE = "GangSchedulerUnavailable"
"""The job asks for a system that is not there. It waits: it is never started without."""


@dataclass(frozen=True)
class Ending:
    """What a plan decides about the attempts of a job, as far as it matters for the objects of a system.

    number: of the current attempt after the decision. pods_may_run: that attempt starts or goes on.
    """

    number: int
    pods_may_run: bool


class Adapter:
    """One system. A method that a system does not need returns nothing.

    kinds: of its objects, which the operator watches where they are served; the first that is served is used.
    """

    kinds: ClassVar[tuple[Resource, ...]] = ()

    def lookups(self, s: JobState) -> Sequence[tuple[Resource, str]]:
        """Return kind and name of the objects of the cluster that a plan needs."""
        return ()

    def wait(self, s: JobState) -> Obstacle | None:
        """Return why no attempt may start; None if it may."""
        return None

    def stop(self, s: JobState) -> str:
        """Return why the current attempt must end; empty if it may go on."""
        return ""

    def without_quota(self, s: JobState) -> Obstacle | None:
        """Return why a job that runs has no quota, if it could not ask for any; None if it has, or was not refused."""
        return None

    def objects(self, s: JobState, attempt: int) -> Sequence[Create]:
        """Return the objects that must exist before the pods of ``attempt``, and that do not."""
        return ()

    def dress(self, pod: Json, s: JobState, attempt: int) -> Json:
        """Return the rendered pod of node 0 with what the system needs in every pod."""
        return pod

    def upkeep(self, s: JobState, ending: Ending) -> Sequence[Create | Change | Delete]:
        """Return what the objects of the system need, also while no attempt runs: no attempt waits for it."""
        return ()

    def leave(self, s: JobState) -> Sequence[Change]:
        """Return what gives back the quota of a job whose template is refused, which nothing may render."""
        return ()

    def obstacle(self, s: JobState) -> Obstacle | None:
        """Return why the system does not place all pods of the attempt, or not as the job asks for."""
        return None


@dataclass(frozen=True)
class Unavailable(Adapter):
    """In place of a system that a job needs and that is not there."""

    message: str
    reason: str = UNAVAILABLE

    def wait(self, s: JobState) -> Obstacle | None:
        return self.reason, self.message
