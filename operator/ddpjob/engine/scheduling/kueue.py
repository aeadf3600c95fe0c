"""Kueue: one Workload for all attempts of a job, whose admission starts an attempt and whose eviction ends it.

The contract is that of Kueue's own jobs (pkg/controller/jobframework/reconciler.go): an admitted Workload keeps its
quota over restarts; an evicted one gives it back when all pods have stopped, and is admitted again later.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddpjob.api import names
from ddpjob.api.limits import MAX_DIGITS
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition, is_true
from ddpjob.api.pod_view import PodView
from ddpjob.api.pods import is_object_name
from ddpjob.api.text import shorten
from ddpjob.api.times import seconds_since
from ddpjob.engine.actions import LOOKUP_SECONDS, MAX_TEXT, Change, Create, Obstacle
from ddpjob.engine.advice import BY_ADMINISTRATOR
from ddpjob.engine.attempt import DRAIN_MARGIN_SECONDS, seconds_to_stop
from ddpjob.engine.evidence import is_on_lost_node
from ddpjob.engine.observed import Unknown
from ddpjob.engine.scheduling.workload import (
    annotations_of,
    because,
    deactivation,
    desired_pod_set,
    desired_workload,
    digest,
    end_of_job,
    flavors_of,
    is_active,
    is_admitted,
    is_ended,
    is_outdated,
    patch,
    priority_class,
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


def lookups(s: JobState) -> tuple[_Lookup, ...]:
    """Return kind and name of the objects of the cluster that a plan needs and that were not read yet."""
    return tuple(each for each in _wanted(s) if each not in s.observed.found)


def look_again(s: JobState) -> float | None:
    """Return the seconds until objects that keep the job from its queue are read again, or a pod that stops is looked
    at because it uses quota; or None.
    """
    is_kept = bool(_wanted(s) and unavailable(s)) if s.attempt.is_closed else without_quota(s) is not None
    again = LOOKUP_SECONDS if is_kept and not s.job.spec.suspend else None
    return min((seconds for seconds in (_seconds_to_look(s), again) if seconds is not None), default=None)


def _wanted(s: JobState) -> Sequence[_Lookup]:
    """Return the flavors of an admission, or those that a held job waits for, or the class of a priority to write."""
    if not _is_served(s) or s.finished or not _queue(s):
        return ()
    workload = _workload(s)
    if workload is not None and is_admitted(workload):
        return [(names.FLAVORS, name) for name in flavors_of(workload)]
    hold = _hold(s, workload) if workload is not None else None
    held = [(names.FLAVORS, name) for name in hold.flavors] if hold is not None else []
    writes = workload is None or priority_class(workload) != _kind_and_name(_wanted_class(s))
    return [*held, *(_wanted_class(s) if writes else ())]


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
    problem = next((p for p in s.observed.problems if p.resource is names.WORKLOADS), None)
    if (workload := _workload(s)) is None:
        waits = (WAITING, f"its Workload for the queue {queue} is being created")
        created = waits if problem is None else (problem.reason, problem.message)
        return _misnamed(s) or _unread(s, _wanted_class(s)) or created
    return _why_not_admitted(s, workload, queue)


def unavailable(s: JobState) -> str:
    """Return why the queue of the job is not available; empty if it is, or if the job is in none."""
    reason, text = wait(s) or ("", "")
    return text if reason == QUEUE_UNAVAILABLE else ""


def stop(s: JobState) -> str:
    """Return why the attempt has no quota and must end. Without a Workload it goes on as long as one may be created."""
    if not (_is_served(s) and _queue(s)):
        return ""
    if (workload := _workload(s)) is None:
        return _why_no_workload(s)
    if is_true(workload["status"], "Evicted"):
        return f"Kueue evicted the job{because(workload, 'Evicted')}"
    return "" if is_admitted(workload) else f"the queue {_queue(s)} has not admitted the job"


def without_quota(s: JobState) -> Obstacle | None:
    """Return why a job that runs has no Workload; None if it has one, or if Kueue is away, when its pods run on."""
    if not (_is_served(s) and _queue(s)) or _workload(s) is not None:
        return None
    reason, text = wait(s) or (WAITING, "")
    return (QUEUE_UNAVAILABLE, f"without quota: {text}") if reason != WAITING else None


def dress(pod: Json, s: JobState) -> Json:
    """Return the pod of node 0 with what the admission adds."""
    workload = _workload(s)
    if workload is None or not _queue(s):
        return pod
    added, meta, spec = _overlay(s, workload), pod["metadata"], dict(pod["spec"])
    if added["nodeSelector"]:
        spec["nodeSelector"] = (spec.get("nodeSelector") or {}) | added["nodeSelector"]
    if tolerations := [each for part in _additions(s, workload) for each in part.get("tolerations") or ()]:
        given = spec.get("tolerations") or []
        spec["tolerations"] = [*given, *(each for each in tolerations if each not in given)]
    meta = meta | {"labels": added["labels"] | meta["labels"]}
    if added["annotations"]:
        meta["annotations"] = added["annotations"] | (meta.get("annotations") or {})
    return pod | {"metadata": meta, "spec": spec}


def upkeep(s: JobState, number: int, *, runs: bool) -> Sequence[Create | Change]:
    """Return the next write to the Workload: they follow each other, each planned from the result of the last."""
    if not _is_served(s):
        return ()
    if (workload := _workload(s)) is None:
        priority, may_wait = _priority(s), not (s.finished or s.job.spec.suspend)
        if not (_queue(s) and may_wait) or _misnamed(s) is not None or priority is None:
            return ()
        return (desired_workload(s, _queue(s), priority),)
    if is_ended(workload):
        return ()
    if s.finished:
        change = end_of_job(s, workload) if _nothing_runs(s) else None
    else:
        change = _change(s, workload, number, runs=runs)
    return (change,) if change is not None else ()


def leave(s: JobState) -> tuple[Change, ...]:
    """Return what gives back the quota of a job whose template is refused, which nothing may render."""
    workload = _workload(s) if _is_served(s) else None
    if workload is None or is_ended(workload) or not _nothing_runs(s):
        return ()
    change = _activation(s, workload, is_wanted=False)
    if change is None and is_true(workload["status"], "QuotaReserved") and is_true(workload["status"], "Evicted"):
        change = release(s, workload)
    return (change,) if change is not None else ()


def _change(s: JobState, workload: Json, number: int, *, runs: bool) -> Change | None:
    status, rests = workload["status"], _is_unused(s, workload, number, runs=runs)
    is_reserved = is_true(status, "QuotaReserved")
    if rests and _queue(s) and not is_reserved and (change := _update(s, workload)) is not None:
        return change
    if rests and (hold := _unusable(s, workload)) is not None:
        return deactivation(s, workload, {names.ANNOTATION_HELD: json.dumps(hold._asdict())})
    # A job that only its user can let start again holds no quota. A label applies when the job has no quota, even
    # one with an impossible name. The job leaves its queue before its quota is free, or Kueue might admit it again.
    has_quota = is_reserved and is_active(workload) and not is_true(status, "Evicted")
    is_misplaced = _misnamed(s) is not None and not has_quota
    is_held = (rests and (s.spec_changed or is_misplaced)) or bool(_why_held(s, workload))
    # The podSets are immutable until the quota is released: a job of another size leaves the queue for that.
    is_wanted = bool(_queue(s)) and not s.job.spec.suspend and not is_held
    if is_wanted and rests and is_reserved and is_outdated(s, workload, is_reserved=True):
        is_wanted = False
    if (change := _activation(s, workload, is_wanted=is_wanted)) is not None:
        return change
    if is_reserved and is_true(status, "Evicted"):
        return release(s, workload) if rests else None
    return readiness(s, workload, number, runs=runs) if is_admitted(workload) and _queue(s) else None


def _queue(s: JobState) -> str:
    return s.labels.get(names.LABEL_QUEUE, "") if s.settings.kueue else ""


def _is_served(s: JobState) -> bool:
    return s.observed.served is None or names.WORKLOADS.api_version in s.observed.served


def _workload(s: JobState) -> Json | None:
    """Return the Workload, which a job that has left its queue keeps, and which then must hold no quota."""
    name = names.service_name(s.job.name, s.job.uid)
    found = s.observed.objects.get(names.WORKLOADS, ()) if s.settings.kueue else ()
    return next((each for each in found if each["metadata"]["name"] == name), None)


def _nothing_runs(s: JobState, last: int | None = None) -> bool:
    """Return whether no pod uses quota. last: later attempts have none; None if all have."""
    return not any(_seconds_of_quota(s, pod) for pod in s.pods if last is None or pod.attempt <= last)


def _seconds_of_quota(s: JobState, pod: PodView) -> float:
    """Return for how long a pod uses quota at most. A node that does not respond may only have lost the API server."""
    if pod.stopped or not is_on_lost_node(pod):
        return 0.0 if pod.stopped else math.inf
    return seconds_to_stop(pod, s.now)


def kept_quota(s: JobState) -> str:
    """Return which pod keeps the quota although its time to stop is over; empty if none does."""
    left, pod = min(_stopping(s), key=lambda each: each[0], default=(0.0, None))
    if pod is None or left > 0:
        return ""
    todo = f"look at the kubelet of {pod.node_name}; if its processes have ended, kubectl delete pod {pod.name} --force"
    what = f"pod {pod.name} on Kubernetes node {pod.node_name} should have stopped at {pod.deletion_deadline}"
    return f"{what} and keeps the quota: {todo}"


def _seconds_to_look(s: JobState) -> float | None:
    """Return when pods on lost Kubernetes nodes use no quota any more, or ``kept_quota`` can name a pod; or None."""
    if _workload(s) is None:
        return None
    lost = max((seconds for seconds in (_seconds_of_quota(s, pod) for pod in s.pods) if seconds < math.inf), default=0)
    stopping = (left for left, _ in _stopping(s)) if s.attempt.is_closed else ()
    return min((seconds for seconds in (lost, *stopping) if seconds > 0), default=None)


def _stopping(s: JobState) -> Iterator[tuple[float, PodView]]:
    workload = _workload(s) if _is_served(s) else None
    if workload is None or not is_true(workload["status"], "QuotaReserved"):
        return
    for pod in s.pods:
        if pod.deletion_deadline and not (pod.stopped or is_on_lost_node(pod)):
            yield DRAIN_MARGIN_SECONDS - seconds_since(pod.deletion_deadline, s.now), pod


def _is_unused(s: JobState, workload: Json, number: int, *, runs: bool) -> bool:
    """Return whether the quota can be released. An attempt that starts after the job has left its queue uses none."""
    recorded = str(annotations_of(workload).get(names.ANNOTATION_SUSPENDED) or "")
    last = int(recorded) if recorded.isdecimal() and len(recorded) <= MAX_DIGITS and not _queue(s) else None
    is_used = runs and (last is None or number <= last)
    return not is_used and _nothing_runs(s, last)


def _why_not_admitted(s: JobState, workload: Json, queue: str) -> Obstacle | None:
    status, name = workload["status"], workload["metadata"]["name"]
    where = f"the queue {queue}"
    if "deletionTimestamp" in workload["metadata"]:
        return WAITING, f"Workload {name} is being deleted; it is created again when it is gone"
    if is_true(status, "Finished"):
        text = f"Workload {name} is finished{because(workload, 'Finished')}, and the job is not: delete the Workload"
        return QUEUE_UNAVAILABLE, text
    if (inactive := _why_inactive(s, workload)) is not None:
        return inactive
    if is_true(status, "Evicted") and is_true(status, "QuotaReserved"):
        hanging = kept_quota(s)
        again = f"; {hanging}" if hanging else "; it waits again when all pods have stopped"
        return WAITING, f"{where}: evicted{because(workload, 'Evicted')}{again}"
    if is_admitted(workload):
        if is_outdated(s, workload, is_reserved=True):
            return WAITING, f"{where}: the job has another size than the one that was admitted"
        return _unread(s, [(names.FLAVORS, each) for each in flavors_of(workload)]) or _conflict(s, workload)
    return _why_pending(s, workload, where)


def _why_inactive(s: JobState, workload: Json) -> Obstacle | None:
    """Return what keeps the Workload from being active; None if it is, or can be activated by the operator."""
    if is_active(workload):
        return None
    if names.ANNOTATION_SUSPENDED not in annotations_of(workload):
        name = workload["metadata"]["name"]
        why = because(workload, "Evicted" if is_true(workload["status"], "Evicted") else "DeactivationTarget")
        patch = '{"spec":{"active":true}}'
        todo = f"{BY_ADMINISTRATOR}kubectl patch workload {name} -n {s.job.namespace} --type merge -p '{patch}'"
        return DEACTIVATED, f"Workload {name} was deactivated{why}; when the cause is gone: {todo}"
    held = _why_held(s, workload)
    return (QUEUE_UNAVAILABLE, held) if held else _misnamed(s)


def _why_no_workload(s: JobState) -> str:
    """Return why no Workload of the job can be created; empty if one may exist, or may be created later.

    A plan that is not live asks for live reads because of this text. A live plan returns the text only if these reads
    have shown that the job has no Workload.
    """
    if s.observed.live and s.observed.has_workload is not False:
        return ""
    found = _misnamed(s) or _unread(s, _wanted_class(s), only_final=True)
    return f"the queue {_queue(s)} cannot admit the job: {found[1]}" if found is not None else ""


def _misnamed(s: JobState) -> Obstacle | None:
    if is_object_name(_queue(s)):
        return None
    return QUEUE_UNAVAILABLE, f"no LocalQueue can have the name {_queue(s)}: correct the label {names.LABEL_QUEUE}"


def _why_pending(s: JobState, workload: Json, where: str) -> Obstacle:
    status = workload["status"]
    if is_true(status, "QuotaReserved"):
        checks = (c for c in status.get("admissionChecks") or () if c.get("state") != "Ready")
        texts = [f"{c.get('name')}: {c.get('state')} {c.get('message') or ''}".strip() for c in checks]
        return WAITING, f"{where}: quota is reserved, and admission waits for {'; '.join(texts) or 'Kueue'}"
    if (misnamed := _misnamed(s)) is not None:
        return misnamed
    unread = _unread(s, _wanted_class(s))
    if unread is not None and priority_class(workload) != _kind_and_name(_wanted_class(s)):
        return unread
    message = shorten(str(condition(status, "QuotaReserved").get("message") or ""), MAX_TEXT)
    return WAITING, f"{where}: {message or 'Kueue has not considered the job yet'}"


def _unread(s: JobState, wanted: Iterable[_Lookup], *, only_final: bool = False) -> Obstacle | None:
    for kind, name in wanted:
        found = s.observed.found.get((kind, name), _NOT_READ_YET)
        if isinstance(found, Unknown) and (found.is_final or not only_final):
            todo = _todo(kind, name) if found.is_final else ""
            return QUEUE_UNAVAILABLE, f"{kind.kind} {name} cannot be read: {found.text}{todo}"
    return None


def _todo(kind: Resource, name: str) -> str:
    """Return what to do about an object that does not exist, or may not be read, as the end of a message."""
    create = "create it (or let the operator read it)" if is_object_name(name) else ""
    advice = ", or ".join(filter(None, (create, _CHANGE.get(kind, ""))))
    return f"; {advice}" if advice else ""


def _additions(s: JobState, workload: Json) -> Iterator[Json]:
    """Yield what each flavor and each admission check adds to every pod."""
    for name in flavors_of(workload):
        flavor = s.observed.found.get((names.FLAVORS, name))
        spec = (flavor.get("spec") or {}) if isinstance(flavor, dict) else {}
        yield {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}
    for check in workload["status"].get("admissionChecks") or ():
        yield from check.get("podSetUpdates") or ()


def _overlay(s: JobState, workload: Json) -> Mapping[str, Json]:
    added: dict[str, Json] = {"nodeSelector": {}, "labels": {}, "annotations": {}}
    for part in _additions(s, workload):
        for kind, values in added.items():
            values.update(part.get(kind) or {})
    return added


def _conflict(s: JobState, workload: Json) -> Obstacle | None:
    """Return a value of the job that the admission would change; Kueue's own jobs fail then."""
    given = s.job.wire.get("template", {}).get("metadata", {}) | {
        "nodeSelector": s.job.template_spec.get("nodeSelector")
    }
    for kind, wanted in _overlay(s, workload).items():
        own = given.get(kind) or {}
        if key := next((key for key, value in wanted.items() if own.get(key, value) != value), None):
            what = f"{kind.removesuffix('s')} {key}={wanted[key]}"
            text = f"the admission wants {what}, and spec.template has {own[key]}"
            return QUEUE_UNAVAILABLE, f"{text}: correct the flavor, or apply the job again without it"
    return None


_MOST_FLAVORS = 64
"""Of a hold; Kueue allows 64 in a ClusterQueue's group. Whoever may patch Workloads may write more."""


class _Hold(NamedTuple):
    """Why a job stays out of its queue: it could not use an admission.

    Without it, the job would be admitted, give the quota back and be admitted again (decision 0052).

    edition: of the job, which ends the hold when it changes. flavors: those that could not be read, and end the hold
    when they can: an API server that starts may refuse a read for a moment.
    """

    edition: str
    why: str
    flavors: Sequence[str]


def _unusable(s: JobState, workload: Json) -> _Hold | None:
    """Return why the job cannot use its admission; None if it can, or as long as a flavor is not known."""
    if not (is_active(workload) and _queue(s) and is_admitted(workload)) or s.job.spec.suspend:
        return None
    unread = [name for name in flavors_of(workload) if _unread(s, [(names.FLAVORS, name)], only_final=True)]
    problem = _unread(s, [(names.FLAVORS, name) for name in unread]) or _conflict(s, workload)
    return _Hold(_edition(s), shorten(problem[1], MAX_TEXT), unread) if problem is not None else None


def _hold(s: JobState, workload: Json) -> _Hold | None:
    """Return the recorded hold of this edition of the job."""
    try:
        recorded = json.loads(str(annotations_of(workload).get(names.ANNOTATION_HELD)))
        flavors = list(dict.fromkeys(map(str, recorded["flavors"])))
        hold = _Hold(recorded["edition"], shorten(str(recorded["why"]), MAX_TEXT), flavors)
    except (LookupError, RecursionError, TypeError, ValueError):  # there is none, or someone has written into it
        return None
    is_ours = hold.edition == _edition(s) and len(flavors) <= _MOST_FLAVORS and not is_active(workload)
    return hold if is_ours else None


def _why_held(s: JobState, workload: Json) -> str:
    """Return why the job stays out of its queue; empty if it does not."""
    hold = _hold(s, workload)
    if hold is None or (
        hold.flavors and all(isinstance(s.observed.found.get((names.FLAVORS, each)), dict) for each in hold.flavors)
    ):
        return ""
    todo = "suspend and resume it, or change the label of its queue"
    return f"{hold.why}. The job has given its quota back; to let it wait again, {todo}"


def _edition(s: JobState) -> str:
    return " ".join([str(s.job.generation), *(s.labels.get(label, "") for label in names.LABELS_OF_QUEUES)])


def _wanted_class(s: JobState) -> Sequence[_Lookup]:
    if name := s.labels.get(names.LABEL_QUEUE_PRIORITY):
        return [(names.WORKLOAD_PRIORITIES, name)]
    name = s.job.template_spec.get("priorityClassName")
    return [(names.POD_PRIORITIES, str(name))] if name else []


def _kind_and_name(wanted: Sequence[_Lookup]) -> tuple[str, str]:
    return (wanted[0][0].kind, wanted[0][1]) if wanted else ("", "")


def _priority(s: JobState) -> Json | None:
    """Return the fields of the priority; None while its class is not known. Kueue needs the number in any case."""
    wanted = _wanted_class(s)
    if not wanted:
        return {"priority": 0, "priorityClassRef": None}
    (kind, name) = wanted[0]
    found = s.observed.found.get((kind, name))
    if not isinstance(found, dict):
        return None
    reference = {"group": kind.api_version.partition("/")[0], "kind": kind.kind, "name": name}
    return {"priority": int(found.get("value") or 0), "priorityClassRef": reference}


def _activation(s: JobState, workload: Json, *, is_wanted: bool) -> Change | None:
    """Return what makes the Workload active, or not.

    One that someone else deactivated stays so: only the operator's own annotation lets it be activated again.
    """
    # A person may have activated what the operator had not: then the next deactivation is not the operator's either.
    is_ours = names.ANNOTATION_SUSPENDED in annotations_of(workload)
    if is_wanted and is_ours:
        removed = {names.ANNOTATION_SUSPENDED: None, names.ANNOTATION_HELD: None}
        return patch(workload, {"active": True}, annotations=removed)
    # Also of an inactive Workload, the last attempt that used its quota is noted when the job leaves the queue.
    leaves = not (_queue(s) or is_ours) and is_true(workload["status"], "QuotaReserved")
    return deactivation(s, workload, {}) if not is_wanted and (is_active(workload) or leaves) else None


def _update(s: JobState, workload: Json) -> Change | None:
    """Return what the spec of a Workload without quota lacks: queue, priority or podSets of a job that was edited."""
    spec: Json = {}
    annotations: Json = {}
    if workload["spec"].get("queueName") != _queue(s) and _misnamed(s) is None:
        spec["queueName"] = _queue(s)
    if priority_class(workload) != _kind_and_name(_wanted_class(s)):
        spec |= _priority(s) or {}
    if is_outdated(s, workload, is_reserved=False):
        pod_set = desired_pod_set(s)
        spec["podSets"] = [pod_set]
        annotations[names.ANNOTATION_POD_SETS] = digest(pod_set)
    return patch(workload, spec, annotations=annotations) if spec else None
