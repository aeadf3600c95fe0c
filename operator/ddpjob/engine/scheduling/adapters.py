"""The systems that place the pods of a job, as one."""

from collections.abc import Mapping, Sequence
from functools import reduce

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Create, Delete
from ddpjob.engine.scheduling.base import Adapter, Ending, Obstacle, Unavailable
from ddpjob.engine.scheduling.gangs import Coscheduling, Kubernetes, Volcano
from ddpjob.engine.state import JobState

GANG_SCHEDULERS: Mapping[str, Adapter] = {
    "kubernetes": Kubernetes(),
    "volcano": Volcano(),
    "coscheduling": Coscheduling(),
}
"""By the setting ``gang_scheduler``."""


def kinds(gang_scheduler: str) -> tuple[Resource, ...]:
    """Return the kinds of objects to watch with this setting."""
    gang = GANG_SCHEDULERS.get(gang_scheduler)
    return gang.kinds if gang else ()


def adapters(s: JobState) -> Sequence[Adapter]:
    """Return the systems that apply to a job."""
    policy, name = s.job.spec.placement.scheduling_policy, s.settings.gang_scheduler
    if name is None or (policy is not None and policy.basic is not None):
        return ()
    if (gang := GANG_SCHEDULERS.get(name)) is None:
        if policy is None:
            return ()
        text = (
            "spec.scheduling asks for a gang, and the operator is configured for no gang scheduler: the administrator "
            "of the operator sets one (chart value scheduling.gangScheduler), or apply the job without it"
        )
        return (Unavailable(text),)
    served = s.observed.served
    if served is not None and not any(kind.api_version in served for kind in gang.kinds):
        wanted = " or ".join(kind.api_version for kind in gang.kinds)
        return (Unavailable(f"the API server does not serve {wanted}, which the gang scheduler {name} needs"),)
    return (gang,)


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    return next((found for adapter in adapters(s) if (found := adapter.wait(s)) is not None), None)


def objects(s: JobState, attempt: int) -> list[Create]:
    """Return the objects that must exist before the pods of ``attempt``, and that do not."""
    return [create for adapter in adapters(s) for create in adapter.objects(s, attempt)]


def dress(pod: Json, s: JobState, attempt: int) -> Json:
    """Return the rendered pod of node 0 with what the systems need in every pod."""
    return reduce(lambda dressed, adapter: adapter.dress(dressed, s, attempt), adapters(s), pod)


def deletes(s: JobState, ending: Ending) -> list[Delete]:
    """Return the deletes of objects that no attempt needs any more."""
    return [delete for adapter in adapters(s) for delete in adapter.deletes(s, ending)]


def obstacle(s: JobState) -> Obstacle | None:
    """Return why the systems do not place all pods of the attempt, or not as the job asks for."""
    return next((found for adapter in adapters(s) if (found := adapter.obstacle(s)) is not None), None)
