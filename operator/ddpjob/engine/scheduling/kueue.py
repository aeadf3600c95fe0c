"""Kueue: one Workload for all attempts of a job, whose admission starts an attempt and whose eviction ends it.

The contract is that of Kueue's own jobs (pkg/controller/jobframework/reconciler.go): an admitted Workload keeps its
quota over restarts; an evicted one gives it back when all pods have stopped, and is admitted again later.
"""

import math
from collections.abc import Mapping, Sequence

from ddpjob.api import names
from ddpjob.api.limits import MAX_DIGITS
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from ddpjob.api.pods import is_object_name
from ddpjob.api.text import shorten
from ddpjob.api.times import seconds_since
from ddpjob.engine.actions import LOOKUP_SECONDS, MAX_TEXT, Change, Create, Obstacle
from ddpjob.engine.advice import BY_ADMINISTRATOR
from ddpjob.engine.attempt import DRAIN_MARGIN_SECONDS, seconds_to_stop
from ddpjob.engine.evidence import is_on_lost_node
from ddpjob.engine.merge import merge
from ddpjob.engine.observed import Unknown
from ddpjob.engine.scheduling.workload import (
    Workload,
    deactivation,
    desired_pod_set,
    desired_workload,
    digest,
    end_of_job,
    is_outdated,
    readiness,
    release,
)
from ddpjob.engine.state import JobState

QUEUE_UNAVAILABLE = "QueueUnavailable"
"""The job asks for a queue that cannot admit it without a change. It waits: it is never started without."""
WAITING = "WaitingForQuota"
DEACTIVATED = "QueueDeactivated"
"""Kueue or an administrator took the job out of its queue until someone puts it back."""
_NOT_READ_YET = Unknown("it was not read yet", is_final=False)
_Lookup = tuple[Resource, str]
_CHANGE: Mapping[Resource, str] = {
    names.WORKLOAD_PRIORITIES: f"change {names.LABEL_QUEUE_PRIORITY}",
    names.POD_PRIORITIES: "change priorityClassName in spec.template",
}
"""How a job asks for another object than one that does not exist, or may not be read."""
_UPDATED: Mapping[str, Sequence[str]] = {"metadata": ("labels", "annotations"), "spec": ("nodeSelector", "tolerations")}
"""What an admission check may add to the parts of a pod."""


def lookups(s: JobState) -> tuple[_Lookup, ...]:
    """Return kind and name of the objects of the cluster that a plan needs and that were not read yet."""
    return tuple(each for each in _wanted(s) if each not in s.observed.found)


def look_again(s: JobState) -> float | None:
    """Return the seconds until what keeps the job from its queue is read again, or until a pod uses no quota any more,
    or is to be named because it still does; or None.
    """
    is_kept = bool(_wanted(s) and unavailable(s)) if s.attempt.is_closed else without_quota(s) is not None
    times = [LOOKUP_SECONDS] if is_kept and not s.job.spec.suspend else []
    times += [seconds_to_stop(pod, s.now) for pod in s.pods] if _workload(s) is not None else []
    return min((seconds for seconds in times if 0 < seconds < math.inf), default=None)


def _wanted(s: JobState) -> Sequence[_Lookup]:
    """Return the flavors of an admission, or the class of a priority to write."""
    workload = _workload(s)
    if s.finished or not _queue(s):
        return ()
    if workload is not None and workload.is_admitted:
        return [(names.FLAVORS, name) for name in workload.flavors]
    return () if workload is not None and _has_its_class(s, workload) else _priority_class(s)


def wait(s: JobState) -> Obstacle | None:
    """Return why no attempt may start; None if it may."""
    queue = s.labels.get(names.LABEL_QUEUE)
    if not queue or s.settings.kueue is None:
        return None
    if not s.settings.kueue:
        text = (
            f"the label {names.LABEL_QUEUE} asks for the queue {queue}, and the operator is not configured for Kueue: "
            "the administrator of the operator sets the chart's kueue.enabled, or remove the label"
        )
        return QUEUE_UNAVAILABLE, text
    if not _is_served(s):
        kind = names.WORKLOADS
        return QUEUE_UNAVAILABLE, f"the API server does not serve {kind.api_version}: install Kueue 0.15 or newer"
    if (workload := _workload(s)) is not None:
        return _why_not_admitted(s, workload)
    problem = next((p for p in s.observed.problems if p.resource is names.WORKLOADS), None)
    waits = (WAITING, f"its Workload for the queue {queue} is being created")
    return _misnamed(s) or _unread(s) or (waits if problem is None else (problem.reason, problem.message))


def unavailable(s: JobState) -> str:
    """Return why the queue of the job is not available; empty if it is, or if the job is in none."""
    reason, text = wait(s) or ("", "")
    return text if reason == QUEUE_UNAVAILABLE else ""


def stop(s: JobState) -> str:
    """Return why the attempt has no quota and must end; empty if it may go on.

    Without a Workload it goes on as long as one may exist, or may be created later. A plan that is not live asks for
    live reads because of this text. A live plan returns the text only if these reads have shown that the job has none.
    """
    if not (queue := _queue(s)):
        return ""
    if (workload := _workload(s)) is None:
        may_exist = s.observed.live and s.observed.has_workload is not False
        found = None if may_exist else _misnamed(s) or _unread(s, only_final=True)
        return f"the queue {queue} cannot admit the job: {found[1]}" if found is not None else ""
    if workload.has("Evicted"):
        return f"Kueue evicted the job{workload.because('Evicted')}"
    return "" if workload.is_admitted else f"the queue {queue} has not admitted the job"


def without_quota(s: JobState) -> Obstacle | None:
    """Return why a job that runs has no Workload; None if it has one, or if Kueue is away, when its pods run on."""
    if not _queue(s) or _workload(s) is not None:
        return None
    reason, text = wait(s) or (WAITING, "")
    return (QUEUE_UNAVAILABLE, f"without quota: {text}") if reason != WAITING else None


def dress(pod: Json, s: JobState) -> Json:
    """Return the pod of node 0 with what the admission adds; what it has itself stays."""
    workload = _workload(s)
    return merge(_overlay(s, workload), pod) if workload is not None and _queue(s) else pod


def upkeep(s: JobState, number: int, *, runs: bool) -> Sequence[Create | Change]:
    """Return the next write to the Workload: they follow each other, each planned from the result of the last."""
    if (workload := _workload(s)) is None:
        priority = _priority(s)
        waits = _queue(s) and not (s.finished or s.job.spec.suspend or _misnamed(s))
        return (desired_workload(s, _queue(s), priority),) if waits and priority is not None else ()
    if workload.is_ended or (s.finished and not _nothing_runs(s)):
        return ()
    change = end_of_job(s, workload) if s.finished else _change(s, workload, number, runs=runs)
    return (change,) if change is not None else ()


def leave(s: JobState) -> tuple[Change, ...]:
    """Return what gives back the quota of a job whose template is refused, which nothing may render."""
    workload = _workload(s)
    if workload is None or workload.is_ended or not _nothing_runs(s):
        return ()
    change = _activation(s, workload, is_wanted=False)
    if change is None and workload.has("QuotaReserved") and workload.has("Evicted"):
        change = release(s, workload)
    return (change,) if change is not None else ()


def _change(s: JobState, workload: Workload, number: int, *, runs: bool) -> Change | None:
    rests, queue = _is_unused(s, workload, number, runs=runs), _queue(s)
    is_reserved, is_evicted = workload.has("QuotaReserved"), workload.has("Evicted")
    if rests and queue and not is_reserved and (change := _update(s, workload)) is not None:
        return change
    # A job that only its user can let start again holds no quota. A label applies when the job has no quota, even
    # one with an impossible name. The job leaves its queue before its quota is free, or Kueue might admit it again.
    # The podSets are immutable until the quota is released: a job of another size leaves the queue for that.
    is_wanted = bool(queue) and not (s.job.spec.suspend or _why_held(s, workload))
    if is_wanted and rests:
        if workload.is_active and workload.is_admitted and (found := _conflict(s, workload)) is not None:
            return deactivation(s, workload, {names.ANNOTATION_HELD: _edition(s) + shorten(found[1], MAX_TEXT)})
        has_quota = is_reserved and workload.is_active and not is_evicted
        is_misplaced = _misnamed(s) is not None and not has_quota
        is_wanted = not (s.spec_changed or is_misplaced or (is_reserved and is_outdated(s, workload)))
    if (change := _activation(s, workload, is_wanted=is_wanted)) is not None:
        return change
    if is_reserved and is_evicted:
        return release(s, workload) if rests else None
    return readiness(s, workload, number, runs=runs) if workload.is_admitted and queue else None


def _queue(s: JobState) -> str:
    return s.labels.get(names.LABEL_QUEUE, "") if s.settings.kueue and _is_served(s) else ""


def _is_served(s: JobState) -> bool:
    return s.observed.served is None or names.WORKLOADS.api_version in s.observed.served


def _workload(s: JobState) -> Workload | None:
    """Return the Workload, which a job that has left its queue keeps, and which then must hold no quota."""
    name = names.service_name(s.job.name, s.job.uid)
    found = s.observed.objects.get(names.WORKLOADS, ()) if s.settings.kueue and _is_served(s) else ()
    return next((Workload(each) for each in found if each["metadata"]["name"] == name), None)


def _nothing_runs(s: JobState, last: int | None = None) -> bool:
    """Return whether no pod uses quota. last: later attempts have none; None if all have."""
    using = (pod for pod in s.pods if not pod.stopped and (last is None or pod.attempt <= last))
    # A node that does not respond may only have lost the API server.
    return all(is_on_lost_node(pod) and seconds_to_stop(pod, s.now) <= 0 for pod in using)


def kept_quota(s: JobState) -> str:
    """Return which pod keeps the quota although its time to stop is over; empty if none does."""
    workload = _workload(s)
    for pod in s.pods if workload is not None and workload.has("QuotaReserved") else ():
        until = pod.deletion_deadline
        if until is None or pod.stopped or is_on_lost_node(pod) or seconds_since(until, s.now) < DRAIN_MARGIN_SECONDS:
            continue
        what = f"pod {pod.name} on Kubernetes node {pod.node_name} should have stopped at {until} and keeps the quota"
        todo = f"look at the kubelet of {pod.node_name}; if its processes have ended, kubectl delete pod {pod.name}"
        return f"{what}: {todo} --force"
    return ""


def _is_unused(s: JobState, workload: Workload, number: int, *, runs: bool) -> bool:
    """Return whether the quota can be released. An attempt that starts after the job has left its queue uses none."""
    recorded = str(workload.annotations.get(names.ANNOTATION_SUSPENDED) or "")
    last = int(recorded) if recorded.isdecimal() and len(recorded) <= MAX_DIGITS and not _queue(s) else None
    is_used = runs and (last is None or number <= last)
    return not is_used and _nothing_runs(s, last)


def _why_not_admitted(s: JobState, workload: Workload) -> Obstacle | None:
    name, where, is_reserved = workload.meta["name"], f"the queue {_queue(s)}", workload.has("QuotaReserved")
    if "deletionTimestamp" in workload.meta:
        return WAITING, f"Workload {name} is being deleted; it is created again when it is gone"
    if workload.has("Finished"):
        text = f"Workload {name} is finished{workload.because('Finished')}, and the job is not: delete the Workload"
        return QUEUE_UNAVAILABLE, text
    if not workload.is_active and (inactive := _why_inactive(s, workload)) is not None:
        return inactive
    if workload.has("Evicted") and is_reserved:
        again = kept_quota(s) or "it waits again when all pods have stopped"
        return WAITING, f"{where}: evicted{workload.because('Evicted')}; {again}"
    if workload.is_admitted:
        if is_outdated(s, workload):
            return WAITING, f"{where}: the job has another size than the one that was admitted"
        return _unread(s) or _conflict(s, workload)
    if is_reserved:
        checks = (c for c in workload.status.get("admissionChecks") or () if c.get("state") != "Ready")
        texts = [f"{c.get('name')}: {c.get('state')} {c.get('message') or ''}".strip() for c in checks]
        return WAITING, f"{where}: quota is reserved, and admission waits for {'; '.join(texts) or 'Kueue'}"
    message = shorten(str(condition(workload.status, "QuotaReserved").get("message") or ""), MAX_TEXT)
    waits = (WAITING, f"{where}: {message or 'Kueue has not considered the job yet'}")
    return _misnamed(s) or _unread(s) or waits


def _why_inactive(s: JobState, workload: Workload) -> Obstacle | None:
    """Return why a Workload is not active; None if the operator can activate it."""
    if names.ANNOTATION_SUSPENDED not in workload.annotations:
        name = workload.meta["name"]
        why = workload.because("Evicted" if workload.has("Evicted") else "DeactivationTarget")
        patch = '{"spec":{"active":true}}'
        todo = f"{BY_ADMINISTRATOR}kubectl patch workload {name} -n {s.job.namespace} --type merge -p '{patch}'"
        return DEACTIVATED, f"Workload {name} was deactivated{why}; when the cause is gone: {todo}"
    held = _why_held(s, workload)
    return (QUEUE_UNAVAILABLE, held) if held else _misnamed(s)


def _misnamed(s: JobState) -> Obstacle | None:
    if is_object_name(_queue(s)):
        return None
    return QUEUE_UNAVAILABLE, f"no LocalQueue can have the name {_queue(s)}: correct the label {names.LABEL_QUEUE}"


def _unread(s: JobState, *, only_final: bool = False) -> Obstacle | None:
    """Return which object that the plan needs is not known, and what to do if it does not exist or may not be read."""
    for kind, name in _wanted(s):
        found = s.observed.found.get((kind, name), _NOT_READ_YET)
        if not isinstance(found, Unknown) or (only_final and not found.is_final):
            continue
        create = "create it (or let the operator read it)" if is_object_name(name) else ""
        todo = ", or ".join(filter(None, (create, _CHANGE.get(kind, "")))) if found.is_final else ""
        return QUEUE_UNAVAILABLE, f"{kind.kind} {name} cannot be read: {found.text}{todo and f'; {todo}'}"
    return None


def _overlay(s: JobState, workload: Workload) -> Json:
    """Return what each flavor and each admission check adds to every pod, as a part of a pod."""
    overlay: Json = {}
    for name in workload.flavors:
        flavor = s.observed.found.get((names.FLAVORS, name))
        spec = (flavor.get("spec") or {}) if isinstance(flavor, dict) else {}
        added = {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}
        overlay = merge(overlay, {"spec": {key: value for key, value in added.items() if value}})
    for check in workload.status.get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            given = {part: {key: update[key] for key in keys if key in update} for part, keys in _UPDATED.items()}
            overlay = merge(overlay, given)
    return overlay


def _conflict(s: JobState, workload: Workload) -> Obstacle | None:
    """Return a value of the job that the admission would change; Kueue's own jobs fail then."""
    overlay, template = _overlay(s, workload), s.job.wire.get("template", {})
    for part, kind in (("metadata", "labels"), ("metadata", "annotations"), ("spec", "nodeSelector")):
        own = (template.get(part) or {}).get(kind) or {}
        for key, wanted in overlay.get(part, {}).get(kind, {}).items():
            if own.get(key, wanted) != wanted:
                text = f"the admission wants {kind.removesuffix('s')} {key}={wanted}, and spec.template has {own[key]}"
                return QUEUE_UNAVAILABLE, f"{text}: correct the flavor, or apply the job again without it"
    return None


def _why_held(s: JobState, workload: Workload) -> str:
    """Return why the job stays out of its queue until it is another edition; empty if it does not.

    The last admission contradicted its template. Without the record, the job would be admitted, give the quota back and
    be admitted again, and perhaps preempt another one each time (decision 0052).
    """
    recorded, edition = str(workload.annotations.get(names.ANNOTATION_HELD)), _edition(s)
    if workload.is_active or not recorded.startswith(edition):
        return ""
    todo = "suspend and resume it, or change the label of its queue"
    why = shorten(recorded.removeprefix(edition), MAX_TEXT)
    return f"{why}. The job has given its quota back; to let it wait again, {todo}"


def _edition(s: JobState) -> str:
    return " ".join([str(s.job.generation), *(s.labels.get(label, "") for label in names.LABELS_OF_QUEUES)]) + ": "


def _priority_class(s: JobState) -> Sequence[_Lookup]:
    if name := s.labels.get(names.LABEL_QUEUE_PRIORITY):
        return [(names.WORKLOAD_PRIORITIES, name)]
    name = s.job.template_spec.get("priorityClassName")
    return [(names.POD_PRIORITIES, str(name))] if name else []


def _has_its_class(s: JobState, workload: Workload) -> bool:
    given = workload.spec.get("priorityClassRef")
    wanted = [(kind.kind, name) for kind, name in _priority_class(s)]
    return wanted == ([(given.get("kind"), given.get("name"))] if given else [])


def _priority(s: JobState) -> Json | None:
    """Return the fields of the priority; None while its class is not known. Kueue needs the number in any case."""
    for kind, name in _priority_class(s):
        found = s.observed.found.get((kind, name))
        if not isinstance(found, dict):
            return None
        reference = {"group": kind.api_version.partition("/")[0], "kind": kind.kind, "name": name}
        return {"priority": int(found.get("value") or 0), "priorityClassRef": reference}
    return {"priority": 0, "priorityClassRef": None}


def _activation(s: JobState, workload: Workload, *, is_wanted: bool) -> Change | None:
    """Return what makes the Workload active, or not.

    One that someone else deactivated stays so: only the operator's own annotation lets it be activated again.
    """
    # A person may have activated what the operator had not: then the next deactivation is not the operator's either.
    is_ours = names.ANNOTATION_SUSPENDED in workload.annotations
    if is_wanted and is_ours:
        removed = {names.ANNOTATION_SUSPENDED: None, names.ANNOTATION_HELD: None}
        return workload.patch({"active": True}, annotations=removed)
    # Also of an inactive Workload, the last attempt that used its quota is noted when the job leaves the queue.
    leaves = not (_queue(s) or is_ours) and workload.has("QuotaReserved")
    return deactivation(s, workload, {}) if not is_wanted and (workload.is_active or leaves) else None


def _update(s: JobState, workload: Workload) -> Change | None:
    """Return what the spec of a Workload without quota lacks: queue, priority or podSets of a job that was edited."""
    spec: Json = {}
    annotations: Json = {}
    if workload.spec.get("queueName") != _queue(s) and _misnamed(s) is None:
        spec["queueName"] = _queue(s)
    if not _has_its_class(s, workload):
        spec |= _priority(s) or {}
    if is_outdated(s, workload):
        pod_set = desired_pod_set(s)
        spec["podSets"] = [pod_set]
        annotations[names.ANNOTATION_POD_SETS] = digest(pod_set)
    return workload.patch(spec, annotations=annotations) if spec else None
