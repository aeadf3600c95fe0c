"""The stories of a job that faults are injected into, by name."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.builders import ended, failed
from tests.injection.runs import Run

Story = Callable[[Run], Awaitable[None]]
_CLAIM = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany"]}


async def succeed(run: Run, after: int = 0) -> None:
    """All nodes of an attempt succeed."""
    pods = await run.running_attempt(after)
    for pod in pods.values():
        await run.cluster.report(pod, ended(0, at=datetime.now(UTC)))
    await run.finished()


async def _success(run: Run) -> None:
    await run.create_job(checkpoint={"claimTemplate": {"spec": _CLAIM}})
    await succeed(run)


async def _rank_failure(run: Run) -> None:
    """Node 1 fails, and the operator stops the other."""
    await run.create_job()
    pods = await run.running_attempt()
    await run.cluster.report(pods[1], failed(1, cause="own", at=datetime.now(UTC)))
    await succeed(run, after=_attempt_of(pods))


async def _drain(run: Run) -> None:
    """A node is drained. Both pods get SIGTERM, save a checkpoint and stop before the next attempt starts."""
    await run.create_job()
    pods = await run.running_attempt()
    await run.cluster.evict(pods[1])
    await succeed(run, after=_attempt_of(pods))


STORIES: dict[str, Story] = {"success": _success, "rank-failure": _rank_failure, "drain": _drain}


def _attempt_of(pods: dict[int, Json]) -> int:
    """Return the number of the attempt, which is not 1 if a create of attempt 1 was refused."""
    return int(pods[0]["metadata"]["labels"][names.LABEL_ATTEMPT])
