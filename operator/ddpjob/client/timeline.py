"""The story of a job: what its status, its pods and the Events of the cluster say, as one sorted list. Pure.

Events are deleted after an hour, pods with a later attempt, and the status has the last five failures: so each says
something that the others no longer say, and what two of them say is listed once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from pydantic import Field

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json, condition, event_time
from ddpjob.api.pod_view import PodState, PodView, pod_view
from ddpjob.api.status import Condition
from ddpjob.api.time_spent import is_time
from ddpjob.api.times import parse_time
from ddpjob.client.job import DDPJob
from ddpjob.client.snapshot import Snapshot

_SAME_SECONDS = timedelta(seconds=3)
"""An Event is sent shortly after the status that it is about."""
_SAME_REASON = {"Retried": "Started", "Resumed": "Started", "Completed": "Ended"}
_COURSE = (
    *("Submitted", "Started", "PodCreated", "Scheduled", "Pulling", "Pulled", "Created", "ContainerStarted", "Running"),
    *("ResumedFromCheckpoint", "FirstStep", "", "CheckpointSaved", "Ended", "Ending", "Restarting", "Suspended"),
    *("Succeeded", "Failed"),
)
"""The order of what happens to an attempt within one second; the empty one is for other reasons."""


class JobEvent(WireModel):
    """Something that happened to a job."""

    time: str
    """When, of repeated events the last time: RFC 3339."""
    type: Literal["Normal", "Warning"]
    """Whether it is expected, or a problem."""
    source: str
    """Who did or saw it: user, operator, scheduler, kubelet, or the component that sent the Event."""
    kind: str
    """Kind of the object: DDPJob, Pod, PersistentVolumeClaim, ..."""
    name: str
    """Name of the object."""
    reason: str
    """What happened, in one CamelCase word."""
    message: str
    """What happened, for a person."""
    count: int = 1
    """How often."""
    attempt: int | None = None
    """Attempt of the job, if it is known."""
    node_rank: int | None = None
    """node_rank of a pod."""


class JobPod(WireModel):
    """One pod of a job."""

    name: str
    """Name of the pod."""
    attempt: int
    """Attempt of the job that it belongs to."""
    node_rank: int
    """Rank of its node in the job."""
    state: PodState
    """State of the trainer's container."""
    deleting: bool = False
    """Whether the pod is being deleted."""
    kubernetes_node: str | None = None
    """Name of the Kubernetes node that it is bound to."""
    created: str | None = None
    """When it was created."""
    started: str | None = None
    """When the trainer started."""
    finished: str | None = None
    """When the trainer ended."""
    exit_code: int | None = None
    """Exit code of the trainer."""
    reason: str | None = None
    """Why it waits or ended, in one CamelCase word."""
    message: str | None = None
    """What the kubelet or the trainer says about it."""


class Timeline(WireModel):
    """What happened to a job, and its pods."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    place: str
    """Where the job is: this machine, or cluster and namespace."""
    events: list[JobEvent]
    """The oldest first."""
    pods: list[JobPod]
    """The pods that there still are, the newest attempt first."""
    unread: list[str] = Field(default_factory=list)
    """What could not be read."""


class Description(Timeline):
    """What ``ddpjob describe -o json`` prints."""

    state: str
    summary: str
    """The state in a sentence."""
    conditions: list[Condition]


def timeline_of(found: Snapshot, place: str) -> Timeline:
    """Return the story and the pods of a job. place: of the job, for a person."""
    job, pods = DDPJob.from_manifest(found.job), found.pods or ()
    return Timeline(
        job=job.name, namespace=str(job.namespace), place=place, events=timeline(job, pods, found.events),
        pods=job_pods(pods), unread=list(found.unread.values()),
    )  # fmt: skip


def job_pods(pods: Iterable[Json]) -> list[JobPod]:
    """Return the pods of a job, the newest attempt first."""
    found = [_job_pod(pod_view(pod), pod) for pod in pods]
    return sorted(found, key=lambda pod: (-pod.attempt, pod.node_rank))


def timeline(job: DDPJob, pods: Iterable[Json] = (), events: Iterable[Json] = ()) -> list[JobEvent]:
    """Return the story of a job, the oldest first.

    Args:
        pods, events: of the cluster, as its API server returns them.
    """
    prefix = f"{names.service_name(job.name, str(job.uid))}-"
    sent = [_of_event(event, prefix) for event in events]
    others = (*_of_job(job), *(entry for pod in pods for entry in _of_pod(pod)))
    kept: list[JobEvent] = [entry for entry in sent if is_time(entry.time)]
    for entry in others:
        if not is_time(entry.time):
            continue
        same = next((number for number, known in enumerate(kept) if _is_same(entry, known)), None)
        if same is None:
            kept.append(entry)
        else:
            kept[same] = kept[same].model_copy(update={"attempt": kept[same].attempt or entry.attempt})
    starts = {entry.attempt or 1: parse_time(entry.time) for entry in kept if _course(entry) == "Started"}
    return sorted(kept, key=lambda entry: _place(entry, starts))


def _place(entry: JobEvent, starts: Mapping[int, datetime]) -> tuple[datetime, int, int]:
    """Return where an entry is in the list. Most times have whole seconds, and a restart takes less."""
    time, course = parse_time(entry.time).replace(microsecond=0), _course(entry)
    attempt = entry.attempt or max((number for number, start in starts.items() if start <= time), default=0)
    attempt = 0 if course == "Submitted" else attempt
    return time, attempt, _COURSE.index(course if course in _COURSE else "")


def _course(entry: JobEvent) -> str:
    return "ContainerStarted" if entry.reason == "Started" and entry.kind == "Pod" else _reason(entry)


def _is_same(one: JobEvent, other: JobEvent) -> bool:
    if (one.kind, one.name, _reason(one)) != (other.kind, other.name, _reason(other)):
        return False
    if None not in (one.attempt, other.attempt) and one.attempt != other.attempt:
        return False
    return abs(parse_time(one.time) - parse_time(other.time)) <= _SAME_SECONDS


def _reason(entry: JobEvent) -> str:
    return _SAME_REASON.get(entry.reason, entry.reason)


def _of_job(job: DDPJob) -> Iterator[JobEvent]:
    """Yield what the status says: decisions, and the course of the current attempt."""
    status, latest = job.status, job.status.attempt

    def entry(time: str | None, reason: str, message: str, attempt: int | None, *, warns: bool = False) -> JobEvent:
        return JobEvent(
            time=time or "", type="Warning" if warns else "Normal", source="operator", kind=names.DDPJOBS.kind,
            name=job.name, reason=reason, message=message, attempt=attempt,
        )  # fmt: skip

    created = job.manifest["metadata"].get("creationTimestamp")
    yield entry(created, "Submitted", "the job was created", None).model_copy(update={"source": "user"})
    yield entry(status.start_time, "Started", "attempt 1 starts", 1)
    for failure in status.failures or ():
        reason, number = "Failed" if failure.action == "Fail" else "Restarting", failure.attempt
        message = f"attempt {number}: {failure.reason}: {failure.message.partition(chr(10))[0]}"
        yield entry(failure.time, reason, message, number, warns=True)
    if (current := status.current_attempt) is not None:
        number = current.number
        yield entry(current.start_time, "Started", f"attempt {number} starts", number)
        yield entry(current.all_running_time, "Running", f"attempt {number}: all nodes run", number)
        yield entry(current.first_step_time, "FirstStep", f"attempt {number} made its first step", number)
        if (ending := current.ending) is not None and ending.verdict is None:
            text = f"attempt {number} ends; its cause is not known yet"
            yield entry(ending.since, "Ending", text, number, warns=True)
    if (saved := status.checkpoint) is not None:
        yield entry(saved.time, "CheckpointSaved", f"step {saved.step}: {saved.path}", None)
    for found in status.conditions or ():
        if found.status == "True" and found.type in ("Suspended", "Succeeded", "Failed", "Stalled"):
            is_stalled, warns = found.type == "Stalled", found.type in ("Failed", "Stalled")
            if not (is_stalled and job.finished):
                reason = found.reason if is_stalled else found.type
                yield entry(found.last_transition_time, reason, found.message, latest, warns=warns)


def _of_pod(pod: Json) -> Iterator[JobEvent]:
    """Yield what the status of a pod says."""
    view = pod_view(pod)

    def entry(time: str | None, source: str, reason: str, message: str, *, warns: bool = False) -> JobEvent:
        return JobEvent(
            time=time or "", type="Warning" if warns else "Normal", source=source, kind="Pod", name=view.name,
            reason=reason, message=message, attempt=view.attempt, node_rank=view.node_rank,
        )  # fmt: skip

    yield entry(pod["metadata"].get("creationTimestamp"), "operator", "PodCreated", f"pod {view.name}")
    scheduled = condition(pod.get("status"), "PodScheduled")
    if scheduled.get("status") == "True":
        time = str(scheduled.get("lastTransitionTime"))
        yield entry(time, "scheduler", "Scheduled", f"Kubernetes node {view.node_name}")
    yield entry(view.started_at, "kubelet", "Started", "the trainer started")
    if view.ended:
        made = _job_pod(view, pod)
        how = f"exit code {view.exit_code}" if view.exit_code is not None else "without an exit code"
        text = ", ".join(part for part in (how, made.reason or "", made.message or "") if part)
        yield entry(view.finished_at, "kubelet", "Ended", text, warns=view.state == "failed")


def _of_event(event: Json, prefix: str) -> JobEvent:
    """Return an Event of the cluster; prefix: of the names of the job's pods."""
    about = event.get("involvedObject") or {}
    source = str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")
    attempt, _, node = str(about.get("name") or "").removeprefix(prefix).partition("-")
    is_pod = about.get("kind") == "Pod" and attempt.isdigit() and node.isdigit()
    series = event.get("series") or {}
    return JobEvent(
        time=str(series.get("lastObservedTime") or event_time(event)),
        type="Warning" if event.get("type") == "Warning" else "Normal",
        source=_COMPONENTS.get(source, source),
        kind=str(about.get("kind")),
        name=str(about.get("name")),
        reason=str(event.get("reason")),
        message=str(event.get("message") or ""),
        count=int(series.get("count") or event.get("count") or 1),
        attempt=int(attempt) if is_pod else None,
        node_rank=int(node) if is_pod else None,
    )


_COMPONENTS: Mapping[str, str] = {
    "default-scheduler": "scheduler",
    "ddpjob-operator": "operator",
}


def local_events(job: DDPJob, lines: Sequence[str]) -> list[Json]:
    """Return the Events in the ``events.log`` of a run of this machine; its lines have no other form."""
    found = []
    for line in lines:
        head, colon, message = line.partition(": ")
        time, _, rest = head.partition(" ")
        kind, _, reason = rest.partition(" ")
        if colon and is_time(time) and reason:
            about = {"kind": names.DDPJOBS.kind, "name": job.name}
            seen = {"type": kind, "reason": reason, "message": message, "lastTimestamp": time}
            found.append({"metadata": {}, "involvedObject": about, "reportingComponent": "operator"} | seen)
    return found


def _job_pod(view: PodView, pod: Json) -> JobPod:
    waiting = view.waiting if view.state == "pending" else None
    reason = waiting[0] if waiting else "Unschedulable" if view.unschedulable else view.disruption or view.reason
    report = view.report.message if view.report else None
    logged = (view.logged.message or view.logged.last_line) if view.logged else None
    message = view.waiting_text if waiting else view.unschedulable or report or logged or view.message
    return JobPod(
        name=view.name, attempt=view.attempt, node_rank=view.node_rank, state=view.state, deleting=view.deleting,
        kubernetes_node=view.node_name, created=pod["metadata"].get("creationTimestamp"), started=view.started_at,
        finished=view.finished_at, exit_code=view.exit_code, reason=reason or None,
        message=(message or "").partition("\n")[0] or None,
    )  # fmt: skip
