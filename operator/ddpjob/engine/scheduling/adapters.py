"""The systems that admit a job and place its pods, as one: its queue says when, and its gang scheduler says where."""

from collections.abc import Sequence

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Change, Create, Delete, EngineSettings, Obstacle
from ddpjob.engine.scheduling import gangs, kueue
from ddpjob.engine.state import JobState


def families(settings: EngineSettings) -> Sequence[Sequence[Resource]]:
    """Return the kinds of objects to watch with these settings; of each sequence the first that is served."""
    gang = gangs.GANG_SCHEDULERS.get(settings.gang_scheduler or "")
    return [*([gang.kinds] if gang else ()), *([(names.WORKLOADS,)] if settings.kueue else ())]


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    return kueue.wait(s) or gangs.wait(s)


def dress(pod: Json, s: JobState, attempt: int) -> Json:
    """Return the rendered pod of node 0 with what the systems need in every pod."""
    return gangs.dress(kueue.dress(pod, s), s, attempt)


def upkeep(s: JobState, number: int, *, runs: bool) -> list[Create | Change | Delete]:
    """Return what the objects of the systems need beside those of an attempt that starts; no attempt waits for it.

    number: of the current attempt after the decision. runs: that attempt starts or goes on.
    """
    return [*kueue.upkeep(s, number, runs=runs), *gangs.unused(s, number, runs=runs)]
