"""One moment of a job, as the live table, the plain lines and the JSON output show it.

Text of other programs is sanitized here, so that no output can forget to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, condition, element, is_true
from ddpjob.cli.text import one_line


@dataclass(frozen=True)
class NodeState:
    """One node of the attempt. since: when this state began, as Kubernetes writes times."""

    rank: int
    pod: str
    state: str
    detail: str = ""
    since: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment. Numbers of the training are text, as in the status. accuracy: from 0 to 1."""

    name: str
    namespace: str
    state: str
    message: str
    attempt: int
    restarts: int
    max_restarts: int
    nodes_ready: str
    num_nodes: int
    nproc_per_node: int | None
    world_size: int | None
    phase: str | None
    epoch: int | None
    total_epochs: int | None
    step: int | None
    total_steps: int | None
    percent: int | None
    loss: str | None
    accuracy: str | None
    samples_per_second: str | None
    eta_seconds: int | None
    checkpoint_step: int | None
    resumed_from_step: int | None
    nodes: tuple[NodeState, ...]

    def wire(self) -> Json:
        """Return the snapshot as JSON, in camelCase as in the status; unknown fields are absent."""
        values = {_camel(key): value for key, value in asdict(self).items() if value not in (None, "")}
        values["nodes"] = [{key: value for key, value in asdict(node).items() if value != ""} for node in self.nodes]
        return values


def take_snapshot(job: Json, pods: Sequence[Json]) -> Snapshot:
    """Return the snapshot of an admitted job and its pods."""
    status, spec = job.get("status") or {}, job["spec"]
    progress, checkpoint = status.get("progress") or {}, status.get("checkpoint") or {}
    world = status.get("world") or {}
    attempt = int(status.get("attempt") or 0)
    return Snapshot(
        name=one_line(job["metadata"]["name"]),
        namespace=one_line(job["metadata"]["namespace"]),
        state=one_line(status.get("state") or "Pending"),
        message=one_line(_message(status)),
        attempt=attempt,
        restarts=int(status.get("restartsCountedTowardsLimit") or 0),
        max_restarts=spec["restartPolicy"]["maxRestarts"],
        nodes_ready=one_line(status.get("nodesReady") or f"0/{spec['numNodes']}"),
        num_nodes=spec["numNodes"],
        nproc_per_node=world.get("nprocPerNode"),
        world_size=world.get("worldSize"),
        phase=_text(progress, "phase"),
        epoch=progress.get("epoch"),
        total_epochs=progress.get("totalEpochs"),
        step=progress.get("step"),
        total_steps=progress.get("totalSteps"),
        percent=progress.get("percent"),
        loss=_text(progress, "loss"),
        accuracy=_text(progress, "accuracy"),
        samples_per_second=_text(progress, "samplesPerSecond"),
        eta_seconds=progress.get("etaSeconds"),
        checkpoint_step=checkpoint.get("step"),
        resumed_from_step=checkpoint.get("resumedFromStep"),
        nodes=tuple(sorted(_nodes(pods, attempt), key=lambda node: node.rank)),
    )


def _message(status: Mapping[str, Any]) -> str:
    """Return the message of the most important condition that is True; empty while the job runs normally."""
    for name in ("Failed", "Stalled", "Suspended", "Restarting"):
        if is_true(status, name) and (message := condition(status, name).get("message")):
            return str(message)
    if is_true(status, "Finished") or is_true(status, "Running"):
        return ""
    return str(condition(status, "Running").get("message") or "")


def _nodes(pods: Sequence[Json], attempt: int) -> list[NodeState]:
    nodes = []
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        rank = str(labels.get(names.LABEL_NODE_RANK, ""))
        if labels.get(names.LABEL_ATTEMPT) == str(attempt) and rank.isdigit():
            state, detail, since = pod_state(pod)
            nodes.append(
                NodeState(int(rank), one_line(pod["metadata"]["name"]), one_line(state), one_line(detail), since)
            )
    return nodes


def pod_state(pod: Json) -> tuple[str, str, str]:
    """Return the state of a pod's trainer as ``kubectl get pods`` shows it, a detail, and when the state began."""
    status = pod.get("status") or {}
    state: Json = element(status.get("containerStatuses"), "name", names.TRAINER_CONTAINER).get("state") or {}
    created = str(pod["metadata"].get("creationTimestamp") or "")
    if ended := state.get("terminated"):
        code = ended.get("exitCode")
        detail = "" if code == 0 else f"exit code {code}"
        return str(ended.get("reason") or "Ended"), detail, str(ended.get("finishedAt") or "")
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating", "", str(pod["metadata"]["deletionTimestamp"])
    if running := state.get("running"):
        return "Running", "", str(running.get("startedAt") or created)
    waiting = state.get("waiting") or {}
    return str(waiting.get("reason") or status.get("phase") or "Pending"), str(waiting.get("message") or ""), created


def _text(progress: Mapping[str, Any], key: str) -> str | None:
    value = progress.get(key)
    return None if value is None else one_line(value)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)
