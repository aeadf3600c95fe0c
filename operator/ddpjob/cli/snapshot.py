"""One moment of a job, as the live table, the plain lines and the JSON output show it.

Text of other programs is sanitized here, so that no output can forget to.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

from ddpjob.api import names
from ddpjob.api.model import ApiModel
from ddpjob.api.objects import Json, condition, element, is_true
from ddpjob.api.status import PauseStatus
from ddpjob.cli.text import accuracy_text, duration, number_of, one_line, speed_text

Line = Annotated[str, BeforeValidator(one_line)]


class Node(ApiModel):
    """One node of the attempt. since: when this state began, as Kubernetes writes times."""

    rank: int
    pod: Line
    state: Line
    detail: Line | None = None
    since: Line | None = None


class Training(ApiModel):
    """What rank 0 has reported. Numbers of the training are text, as in the status. accuracy: from 0 to 1."""

    model_config = ConfigDict(extra="ignore")

    phase: Line | None = None
    epoch: int | None = None
    total_epochs: int | None = None
    step: int | None = None
    total_steps: int | None = None
    percent: int | None = None
    loss: Line | None = None
    accuracy: Line | None = None
    samples_per_second: Line | None = None
    steps_per_second: Line | None = None
    eta_seconds: int | None = None
    checkpoint_step: int | None = None
    resumed_from_step: int | None = None
    pause: PauseStatus | None = None

    def training_facts(self) -> list[str]:
        """Return the progress of the training, one fact per entry; none if the program reports no progress."""
        pause = self.pause.text(datetime.now(UTC)) if self.pause else ""
        return [fact for fact in (*self._facts(), pause) if fact]

    def _facts(self) -> list[str]:
        speed = [speed_text(self.samples_per_second)] if self.samples_per_second else []
        if self.steps_per_second and not speed:
            speed = [f"{self.steps_per_second} steps/s"]
        if self.step is None or not (self.total_steps or self.percent):
            return [f"step {self.step}", *speed] if self.step else [self.phase] if self.phase else []
        steps = f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}"
        epochs = f"epoch {self.epoch}/{self.total_epochs}" if self.total_epochs else f"epoch {self.epoch}"
        return [
            epochs if self.epoch else "",
            steps + (f" ({self.percent} %)" if self.percent else ""),
            f"loss {self.loss}" if self.loss else "",
            f"accuracy {accuracy_text(self.accuracy)}" if self.accuracy else "",
            *speed,
            f"{duration(self.eta_seconds)} left" if self.eta_seconds else "",
            f"checkpoint of step {self.checkpoint_step}" if self.checkpoint_step is not None else "",
            f"resumed from step {self.resumed_from_step}" if self.resumed_from_step is not None else "",
        ]


class Snapshot(Training):
    """A job at one moment."""

    name: Line
    namespace: Line
    state: Line
    message: Line | None = None
    attempt: int
    restarts: int
    max_restarts: int
    restarts_in_place: int
    nodes_ready: Line
    num_nodes: int
    nproc_per_node: int | None = None
    world_size: int | None = None
    nodes: list[Node]

    @property
    def news(self) -> str:
        """The message, unless the end of the run has it, with what to do."""
        return self.message or "" if self.state not in ("Failed", "Suspended") else ""

    def job_facts(self) -> list[str]:
        """Return what is known about the job's pods, one fact per entry."""
        facts = [
            f"nodes {self.nodes_ready}",
            number_of(self.world_size, "rank") if self.world_size else "",
            f"attempt {self.attempt}" if self.attempt > 1 else "",
            f"restarts {self.restarts} of at most {self.max_restarts}" if self.restarts else "",
            f"{number_of(self.restarts_in_place, 'restart')} in place" if self.restarts_in_place else "",
        ]
        return [fact for fact in facts if fact]


def take_snapshot(job: Json, pods: Sequence[Json]) -> Snapshot:
    """Return the snapshot of an admitted job and its pods."""
    from ddpjob.api.pod_view import pod_view
    from ddpjob.api.spec import parse_spec
    from ddpjob.api.status import recorded_status

    status, spec = job.get("status") or {}, job["spec"]
    checkpoint, attempt = status.get("checkpoint") or {}, int(status.get("attempt") or 0)
    known = {
        **(status.get("world") or {}),
        **(status.get("progress") or {}),
        "name": job["metadata"]["name"],
        "namespace": job["metadata"]["namespace"],
        "state": status.get("state") or "Pending",
        "message": _message(status) or None,
        "attempt": attempt,
        "restarts": int(status.get("restartsCountedTowardsLimit") or 0),
        "maxRestarts": parse_spec(job, ignore_unknown=True).restart_policy.limit(
            has_trained=recorded_status(status).has_trained
        ),
        "restartsInPlace": int(status.get("restartsInPlace") or 0),
        "nodesReady": status.get("nodesReady") or f"0/{spec['numNodes']}",
        "numNodes": spec["numNodes"],
        "checkpointStep": checkpoint.get("step"),
        "resumedFromStep": checkpoint.get("resumedFromStep"),
        "pause": status.get("pause"),
        "nodes": sorted(
            (_node(pod, view.node_rank) for pod in pods if (view := pod_view(pod)).attempt == attempt),
            key=lambda node: node.rank,
        ),
    }
    return Snapshot.model_validate(known)


def _message(status: Mapping[str, Any]) -> str:
    """Return the message of the most important condition that is True; empty while the job runs normally."""
    for name in ("Failed", "Stalled", "Suspended", "Restarting"):
        if is_true(status, name) and (message := condition(status, name).get("message")):
            return str(message)
    if is_true(status, "Finished") or is_true(status, "Running"):
        return ""
    return str(condition(status, "Running").get("message") or "")


def _node(pod: Json, rank: int) -> Node:
    """Return the state of a pod's trainer as ``kubectl get pods`` shows it."""
    meta, status = pod["metadata"], pod.get("status") or {}
    state: Json = element(status.get("containerStatuses"), "name", names.TRAINER_CONTAINER).get("state") or {}
    waiting, detail = state.get("waiting") or {}, None
    if ended := state.get("terminated"):
        shown, since = ended.get("reason") or "Ended", ended.get("finishedAt")
        detail = f"exit code {ended.get('exitCode')}" if ended.get("exitCode") != 0 else None
    elif since := meta.get("deletionTimestamp"):
        shown = "Terminating"
    elif running := state.get("running"):
        shown, since = "Running", running.get("startedAt") or meta.get("creationTimestamp")
    else:
        shown, since = waiting.get("reason") or status.get("phase") or "Pending", meta.get("creationTimestamp")
        detail = waiting.get("message") or None
    return Node(rank=rank, pod=meta["name"], state=shown, detail=detail, since=since)
