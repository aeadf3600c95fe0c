"""What is to be said of a job at one moment, the same for a table, for plain lines and for programs.

Every text that came from elsewhere is made harmless here, so that no way of showing it can forget to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpjob.api import names
from ddpjob.cli.text import one_line

Json = dict[str, Any]


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
        """For programs: camelCase as in the status, absent where unknown."""
        values = {_camel(key): value for key, value in asdict(self).items() if value not in (None, "")}
        values["nodes"] = [{key: value for key, value in asdict(node).items() if value != ""} for node in self.nodes]
        return values


def snapshot(job: Json, pods: Sequence[Json]) -> Snapshot:
    """The facts of a job and its pods."""
    status, spec = job.get("status") or {}, job.get("spec") or {}
    progress, checkpoint = status.get("progress") or {}, status.get("checkpoint") or {}
    attempt = int(status.get("attempt") or 0)
    num_nodes = int(spec.get("numNodes") or 1)
    return Snapshot(
        name=one_line(job["metadata"]["name"]),
        namespace=one_line(job["metadata"].get("namespace") or "default"),
        state=one_line(status.get("state") or "Pending"),
        message=one_line(_message(status)),
        attempt=attempt,
        restarts=int(status.get("restarts") or 0),
        max_restarts=int((spec.get("restartPolicy") or {}).get("maxRestarts", 3)),
        nodes_ready=one_line(status.get("nodesReady") or f"0/{num_nodes}"),
        num_nodes=num_nodes,
        nproc_per_node=(status.get("world") or {}).get("nprocPerNode"),
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


def condition(status: Mapping[str, Any], name: str) -> Json:
    """A condition of a status, {} where it is not set."""
    return next((dict(c) for c in status.get("conditions") or () if c.get("type") == name), {})


def _message(status: Mapping[str, Any]) -> str:
    """The most telling message of the conditions that hold; none while everything runs as it should."""
    for name in ("Failed", "Stalled", "Suspended", "Restarting"):
        found = condition(status, name)
        if found.get("status") == "True" and found.get("message"):
            return str(found["message"])
    if condition(status, "Finished").get("status") == "True":
        return ""
    running = condition(status, "Running")
    return "" if running.get("status") == "True" else str(running.get("message") or "")


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
    """State, detail and since when, of a pod's trainer, as ``kubectl get pods`` would put it."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or ()
    trainer: Json = next((c for c in containers if c.get("name") == names.TRAINER_CONTAINER), {})
    state: Json = trainer.get("state") or {}
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
