"""The systems that admit a job and place its pods, as one: its queue says when, and its gang scheduler says where."""

from collections.abc import Mapping, Sequence

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import LOOKUP_SECONDS, Change, Create, Delete, EngineSettings, Obstacle
from ddpjob.engine.scheduling import kueue
from ddpjob.engine.scheduling.gangs import Coscheduling, Gang, Kubernetes, Volcano
from ddpjob.engine.state import JobState

GANG_SCHEDULERS: Mapping[str, Gang] = {
    "kubernetes": Kubernetes(),
    "volcano": Volcano(),
    "coscheduling": Coscheduling(),
}
"""By the setting ``gang_scheduler``."""
UNAVAILABLE = "GangSchedulerUnavailable"
"""The job asks for a system that is not there. It waits: it is never started without."""


def families(settings: EngineSettings) -> Sequence[Sequence[Resource]]:
    """Return the kinds of objects to watch with these settings; of each sequence the first that is served."""
    gang = GANG_SCHEDULERS.get(settings.gang_scheduler or "")
    return [*([gang.kinds] if gang else ()), *([(names.WORKLOADS,)] if settings.kueue else ())]


def _is_queued(s: JobState) -> bool:
    """Whether Kueue applies. Of a job that has left its queue, the Workload remains and must hold no quota."""
    return bool(s.settings.kueue and (s.labels.get(names.LABEL_QUEUE) or s.observed.objects.get(names.WORKLOADS)))


def _gang_scheduler(s: JobState) -> tuple[Gang | None, str]:
    """Return the gang scheduler that places the pods of the job, or why the one that the job asks for is not there."""
    policy, name = s.job.spec.placement.scheduling_policy, s.settings.gang_scheduler
    if name is None or (policy is not None and policy.basic is not None):
        return None, ""
    if (gang := GANG_SCHEDULERS.get(name)) is None:
        text = (
            "spec.scheduling asks for a gang, and the operator is configured for no gang scheduler: the administrator "
            "of the operator sets one (chart value scheduling.gangScheduler), or apply the job without it"
        )
        return None, text if policy is not None else ""
    served = s.observed.served
    if served is not None and not any(kind.api_version in served for kind in gang.kinds):
        wanted = " or ".join(kind.api_version for kind in gang.kinds)
        return None, f"the API server does not serve {wanted}, which the gang scheduler {name} needs"
    return gang, ""


def lookups(s: JobState) -> tuple[tuple[Resource, str], ...]:
    """Return kind and name of the objects of the cluster that a plan needs and that were not read yet."""
    return tuple(each for each in kueue.lookups(s) if each not in s.observed.found) if _is_queued(s) else ()


def look_again(s: JobState) -> float | None:
    """Return the seconds until objects that keep the job from its queue are read again, or a pod that stops is looked
    at because it uses quota; or None.
    """
    if not s.settings.kueue:
        return None
    if s.attempt.is_closed:
        is_kept = _is_queued(s) and bool(kueue.lookups(s)) and bool(unavailable(s))
    else:
        is_kept = without_quota(s) is not None
    again = LOOKUP_SECONDS if is_kept and not s.job.spec.suspend else None
    return min((seconds for seconds in (kueue.seconds_to_look(s), again) if seconds is not None), default=None)


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    if (found := _wait_for_queue(s)) is not None:
        return found
    _, why = _gang_scheduler(s)
    return (UNAVAILABLE, why) if why else None


def _wait_for_queue(s: JobState) -> Obstacle | None:
    if _is_queued(s):
        return kueue.wait(s)
    queue = s.labels.get(names.LABEL_QUEUE)
    if not queue or s.settings.kueue is None:
        return None
    text = (
        f"the label {names.LABEL_QUEUE} asks for the queue {queue}, and the operator is not configured for Kueue: the "
        "administrator of the operator sets the chart's kueue.enabled, or remove the label"
    )
    return kueue.QUEUE_UNAVAILABLE, text


def unavailable(s: JobState) -> str:
    """Return why the queue of the job is not available; empty if it is, or if the job is in none."""
    reason, text = _wait_for_queue(s) or ("", "")
    return text if reason == kueue.QUEUE_UNAVAILABLE else ""


def without_quota(s: JobState) -> Obstacle | None:
    """Return why a job that runs has no quota, if it could not ask for any; None if it has, or was not refused."""
    return kueue.without_quota(s) if _is_queued(s) else None


def stop(s: JobState) -> str:
    """Return why the current attempt must end; empty if it may go on."""
    return kueue.stop(s) if _is_queued(s) else ""


def places_all_or_none(s: JobState) -> bool:
    """Whether a gang scheduler places the pods of the job."""
    return _gang_scheduler(s)[0] is not None


def objects(s: JobState, attempt: int) -> Sequence[Create]:
    """Return the objects that must exist before the pods of ``attempt``, and that do not."""
    gang, _ = _gang_scheduler(s)
    return gang.objects(s, attempt) if gang is not None else ()


def dress(pod: Json, s: JobState, attempt: int) -> Json:
    """Return the rendered pod of node 0 with what the systems need in every pod."""
    gang, _ = _gang_scheduler(s)
    queued = kueue.dress(pod, s) if _is_queued(s) else pod
    return gang.dress(queued, s, attempt) if gang is not None else queued


def upkeep(s: JobState, number: int, *, runs: bool) -> list[Create | Change | Delete]:
    """Return what the objects of the systems need beside those of an attempt that starts; no attempt waits for it.

    number: of the current attempt after the decision. runs: that attempt starts or goes on.
    """
    gang, _ = _gang_scheduler(s)
    unused = gang.unused(s, number, runs=runs) if gang is not None else ()
    return [*(kueue.upkeep(s, number, runs=runs) if _is_queued(s) else ()), *unused]


def leave(s: JobState) -> tuple[Change, ...]:
    """Return what gives back the quota of a job whose template is refused, which nothing may render."""
    return kueue.leave(s) if _is_queued(s) else ()


def obstacle(s: JobState) -> Obstacle | None:
    """Return why the gang scheduler does not place all pods of the attempt, or not as the job asks for."""
    gang, _ = _gang_scheduler(s)
    return gang.obstacle(s) if gang is not None else None
