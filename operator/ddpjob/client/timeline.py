"""What happened to a job, as its Events say, and its pods: what ``ddpjob describe`` shows below the card. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json, event_time
from ddpjob.api.pod_view import PodState, PodView, pod_view
from ddpjob.api.status import Condition
from ddpjob.api.time_spent import is_time
from ddpjob.api.times import parse_time
from ddpjob.client.job import DDPJob
from ddpjob.client.snapshot import Snapshot


class JobEvent(WireModel):
    """An Event about a job."""

    time: str
    """When, of repeated events the last time: RFC 3339."""
    type: Literal["Normal", "Warning"]
    """Whether it is expected, or a problem."""
    source: str
    """Who did or saw it: operator, scheduler, kubelet, or another component that sent the Event."""
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
    """Attempt of a pod."""
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
    """The Events about a job, its pods and its claims, and its pods."""

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
    """Return the Events and the pods of a job. place: of the job, for a person."""
    job, pods = DDPJob.from_manifest(found.job), found.pods or ()
    prefix = f"{names.service_name(job.name, str(job.uid))}-"
    events = (_of_event(event, prefix) for event in found.events)
    return Timeline(
        job=job.name, namespace=str(job.namespace), place=place, pods=job_pods(pods),
        events=sorted((event for event in events if is_time(event.time)), key=lambda event: parse_time(event.time)),
        unread=list(found.unread.values()),
    )  # fmt: skip


def job_pods(pods: Iterable[Json]) -> list[JobPod]:
    """Return the pods of a job, the newest attempt first."""
    found = [_job_pod(pod_view(pod), pod) for pod in pods]
    return sorted(found, key=lambda pod: (-pod.attempt, pod.node_rank))


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
