"""One moment of a job, as the live table, the plain lines and the JSON output show it.

Text of other programs is sanitized here and in ``card``, so that no output can forget to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator

from ddpjob.api import names
from ddpjob.api.model import ApiModel
from ddpjob.api.objects import Json, element
from ddpjob.cli.card import news, progress_facts, restarts_text, troubles
from ddpjob.cli.text import number_of, one_line
from ddpjob.client.job import DDPJob

Line = Annotated[str, BeforeValidator(one_line)]


class Node(ApiModel):
    """One node of the attempt. since: when this state began, as Kubernetes writes times."""

    rank: int
    pod: Line
    state: Line
    detail: Line | None = None
    since: Line | None = None


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment, and the nodes of its attempt."""

    job: DDPJob
    nodes: list[Node]

    @property
    def state(self) -> str:
        return one_line(self.job.state)

    @property
    def news(self) -> str:
        """What keeps the job from running as usual; empty at its end, which says it with what to do."""
        return news(self.job)

    def job_facts(self) -> list[str]:
        """Return what is known about the job's pods, one fact per entry."""
        status = self.job.status
        facts = [
            f"nodes {status.nodes_ready or '0/' + str(self.job.manifest['spec']['numNodes'])}",
            number_of(status.world.world_size, "rank") if status.world else "",
            f"attempt {status.attempt}" if (status.attempt or 0) > 1 else "",
            restarts_text(self.job),
        ]
        return [one_line(fact) for fact in facts if fact]

    def training_facts(self) -> list[str]:
        """Return the progress of the training, one fact per entry; none if the program reports no progress."""
        status, facts = self.job.status, []
        if saved := status.checkpoint:
            facts.append(f"checkpoint of step {saved.step}")
            facts += [f"resumed from step {saved.resumed_from_step}"] if saved.resumed_from_step is not None else []
        return [*progress_facts(status), *facts, *troubles(self.job, datetime.now(UTC))]


def take_snapshot(job: DDPJob, pods: Sequence[Json]) -> Snapshot:
    """Return the snapshot of an admitted job and its pods."""
    from ddpjob.api.pod_view import pod_view

    views = [(pod, pod_view(pod)) for pod in pods]
    nodes = [_node(pod, view.node_rank) for pod, view in views if view.attempt == (job.status.attempt or 0)]
    return Snapshot(job, sorted(nodes, key=lambda node: node.rank))


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
