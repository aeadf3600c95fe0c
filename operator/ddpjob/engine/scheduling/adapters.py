"""The systems that admit a job and place its pods, as one."""

from collections.abc import Mapping, Sequence
from functools import reduce

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Change, Create, Delete, EngineSettings
from ddpjob.engine.scheduling.base import LOOKUP_SECONDS, Adapter, Ending, Obstacle, Unavailable
from ddpjob.engine.scheduling.gangs import Coscheduling, Gang, Kubernetes, Volcano
from ddpjob.engine.scheduling.kueue import QUEUE_UNAVAILABLE, Kueue, seconds_to_look
from ddpjob.engine.state import JobState

GANG_SCHEDULERS: Mapping[str, Adapter] = {
    "kubernetes": Kubernetes(),
    "volcano": Volcano(),
    "coscheduling": Coscheduling(),
}
"""By the setting ``gang_scheduler``."""
_KUEUE = Kueue()


def families(settings: EngineSettings) -> Sequence[Sequence[Resource]]:
    """Return the kinds of objects to watch with these settings; of each sequence the first that is served."""
    gang = GANG_SCHEDULERS.get(settings.gang_scheduler or "")
    return [adapter.kinds for adapter in (gang, _KUEUE if settings.kueue else None) if adapter is not None]


def adapters(s: JobState) -> Sequence[Adapter]:
    """Return the systems that apply to a job: its queue, which says when, and its gang scheduler, which says where."""
    return (*_queue(s), *_gang_scheduler(s))


def _queue(s: JobState) -> Sequence[Adapter]:
    queue = s.labels.get(names.LABEL_QUEUE)
    if s.settings.kueue:
        # Of a job that has left its queue, the Workload remains and must hold no quota.
        return (_KUEUE,) if queue or s.observed.objects.get(names.WORKLOADS) else ()
    if not queue or s.settings.kueue is None:
        return ()
    text = (
        f"the label {names.LABEL_QUEUE} asks for the queue {queue}, and the operator is not configured for Kueue: the "
        "administrator of the operator sets the chart's kueue.enabled, or remove the label"
    )
    return (Unavailable(text, QUEUE_UNAVAILABLE),)


def _gang_scheduler(s: JobState) -> Sequence[Adapter]:
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


def lookups(s: JobState) -> tuple[tuple[Resource, str], ...]:
    """Return kind and name of the objects of the cluster that a plan needs and that were not read yet."""
    wanted = (each for adapter in adapters(s) for each in adapter.lookups(s))
    return tuple(each for each in wanted if each not in s.observed.found)


def look_again(s: JobState) -> float | None:
    """Return the seconds until objects that keep the job from its queue are read again, or a pod that stops is looked
    at because it uses quota; or None.
    """
    if s.attempt.is_closed:
        is_kept = any(adapter.lookups(s) for adapter in adapters(s)) and bool(unavailable(s))
    else:
        is_kept = without_quota(s) is not None
    again = LOOKUP_SECONDS if is_kept and not s.job.spec.suspend else None
    left = seconds_to_look(s) if s.settings.kueue else None
    return min((seconds for seconds in (left, again) if seconds is not None), default=None)


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    return next((found for adapter in adapters(s) if (found := adapter.wait(s)) is not None), None)


def unavailable(s: JobState) -> str:
    """Return why the queue of the job is not available; empty if it is, or if the job is in none."""
    reason, text = wait(s) or ("", "")
    return text if reason == QUEUE_UNAVAILABLE else ""


def without_quota(s: JobState) -> Obstacle | None:
    """Return why a job that runs has no quota, if it could not ask for any; None if it has, or was not refused."""
    return next((found for adapter in adapters(s) if (found := adapter.without_quota(s)) is not None), None)


def stop(s: JobState) -> str:
    """Return why the current attempt must end; empty if it may go on."""
    return next((found for adapter in adapters(s) if (found := adapter.stop(s))), "")


def places_all_or_none(s: JobState) -> bool:
    """Whether a gang scheduler places the pods of the job."""
    return any(isinstance(adapter, Gang) for adapter in adapters(s))


def objects(s: JobState, attempt: int) -> list[Create]:
    """Return the objects that must exist before the pods of ``attempt``, and that do not."""
    return [create for adapter in adapters(s) for create in adapter.objects(s, attempt)]


def dress(pod: Json, s: JobState, attempt: int) -> Json:
    """Return the rendered pod of node 0 with what the systems need in every pod."""
    return reduce(lambda dressed, adapter: adapter.dress(dressed, s, attempt), adapters(s), pod)


def upkeep(s: JobState, ending: Ending) -> list[Create | Change | Delete]:
    """Return what the objects of the systems need beside those of an attempt that starts."""
    return [request for adapter in adapters(s) for request in adapter.upkeep(s, ending)]


def leave(s: JobState) -> tuple[Change, ...]:
    """Return what gives back the quota of a job whose template is refused."""
    return tuple(change for adapter in adapters(s) for change in adapter.leave(s))


def obstacle(s: JobState) -> Obstacle | None:
    """Return why the systems do not place all pods of the attempt, or not as the job asks for."""
    return next((found for adapter in adapters(s) if (found := adapter.obstacle(s)) is not None), None)
