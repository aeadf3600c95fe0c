"""Annotations of running pods that say what the loss of a pod costs: when its job saved last, and its progress.

A scheduler or an administrator who chooses victims can prefer the pods of a job that has just saved. Each pod carries
the time of its last patch, so that also a new operator keeps the distance between two.
"""

from ddpjob.api import names
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import DDPJobStatus
from ddpjob.api.times import remaining, timestamp
from ddpjob.engine.actions import Change
from ddpjob.engine.decision import Decision
from ddpjob.engine.state import JobState

PACE_SECONDS = 60.0
"""No pod is patched more often."""
PODS_PER_SECOND = 10
"""The pods of a job with more than 600 nodes are patched less often, so that no job causes more requests."""
PODS_PER_PLAN = 16


def annotated(s: JobState, decision: Decision, status: DDPJobStatus) -> tuple[list[Change], float | None]:
    """Return the patches that are due, and in how many seconds the next is; None without a next.

    status: after the decision.
    """
    stays = decision.kind in ("continue", "hold") and not (s.attempt.is_closed or s.attempt.is_settling)
    # Before all pods run, a patch that fails would keep others from being created.
    stays = stays and s.attempt.all_running_time is not None
    # Local mode has no scheduler, and no pods that can be patched.
    if not (s.job.spec.placement.annotate_pods and stays) or s.settings.gang_scheduler is None:
        return [], None
    wanted = _wanted(status)
    outdated = [pod for _, pod in sorted(s.current.items()) if _is_outdated(pod, wanted)]
    waits = {pod.name: _wait(pod, s) for pod in outdated}
    due = [pod for pod in outdated if waits[pod.name] <= 0]
    values = wanted | {names.ANNOTATION_PROGRESS_TIME: timestamp(s.now)}
    changes = [Change(names.PODS, pod.name, pod.uid, {}, annotations=values) for pod in due[:PODS_PER_PLAN]]
    left = [wait for wait in waits.values() if wait > 0] + [0.0] * (len(due) > PODS_PER_PLAN)
    return changes, min(left, default=None)


def _wanted(status: DDPJobStatus) -> dict[str, str]:
    saved, progress = status.checkpoint, status.progress
    found: dict[str, str] = {}
    if saved is not None:
        found[names.ANNOTATION_CHECKPOINT_TIME] = saved.time
    if progress is not None and progress.percent is not None:
        found[names.ANNOTATION_PROGRESS] = f"{progress.percent}%"
    elif progress is not None and progress.step is not None:
        found[names.ANNOTATION_PROGRESS] = str(progress.step)
    return found


def _is_outdated(pod: PodView, wanted: dict[str, str]) -> bool:
    if pod.state != "running" or pod.deleting:
        return False
    has = {names.ANNOTATION_CHECKPOINT_TIME: pod.checkpoint_time, names.ANNOTATION_PROGRESS: pod.progress}
    return not wanted.items() <= has.items()


def _wait(pod: PodView, s: JobState) -> float:
    """Return the seconds until the pod may be patched. A time that is none, or that is still to come, is no reason."""
    pace = max(PACE_SECONDS, len(s.job.node_ranks) / PODS_PER_SECOND)
    try:
        return remaining(pace, pod.progress_time, s.now)
    except (ValueError, TypeError):  # a user may write any text, or a time without its zone
        return 0.0
