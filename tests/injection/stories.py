"""The stories of a job that faults are injected into, by name."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.builders import ended, failed
from tests.injection.runs import Run

Story = Callable[[Run], Awaitable[None]]
STORIES: dict[str, Story] = {}
_CLAIM = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany"]}


def _story(name: str) -> Callable[[Story], Story]:
    def register(story: Story) -> Story:
        STORIES[name] = story
        return story

    return register


async def succeed(run: Run, after: int = 0) -> None:
    """All nodes of an attempt succeed."""
    pods = await run.running_attempt(after)
    for pod in pods.values():
        await run.cluster.report(pod, ended(0, at=datetime.now(UTC)))
    await run.finished()


@_story("success")
async def _success(run: Run) -> None:
    await run.create_job(checkpoint={"claimTemplate": {"spec": _CLAIM}})
    await succeed(run)


@_story("rank-failure")
async def _rank_failure(run: Run) -> None:
    await _fails(run, failed(1, cause="own", at=datetime.now(UTC)))


@_story("drain")
async def _drain(run: Run) -> None:
    """A node is drained. Both pods get SIGTERM, save a checkpoint and stop before the next attempt starts."""
    await run.create_job()
    pods = await run.running_attempt()
    await run.cluster.evict(pods[1])
    await succeed(run, after=_attempt_of(pods))


@_story("suspension")
async def _suspension(run: Run) -> None:
    await run.create_job()
    pods = await run.running_attempt()
    await run.patch_job(suspend=True)
    await run.until("the job is suspended", lambda: run.status().get("state") == "Suspended" and not run.all_pods())
    await run.patch_job(suspend=False)
    await succeed(run, after=_attempt_of(pods))


@_story("time-to-live")
async def _time_to_live(run: Run) -> None:
    """The operator deletes the finished job, and the garbage collector what it owned."""
    await run.create_job(ttlSecondsAfterFinished=2)
    await succeed(run)
    await run.until("the job is gone", lambda: run.job() is None)
    owned = (names.PODS, names.SERVICES)
    await run.until(
        "what it owned is gone",
        lambda: not any(run.cluster.history.objects(resource, run.namespace) for resource in owned),
    )


async def _fails(run: Run, failure: Json) -> None:
    """Node 1 fails, and the operator stops the other."""
    await run.create_job()
    pods = await run.running_attempt()
    await run.cluster.report(pods[1], failure)
    await succeed(run, after=_attempt_of(pods))


def _attempt_of(pods: dict[int, Json]) -> int:
    """Return the number of the attempt, which is not 1 if a create of attempt 1 was refused."""
    return int(pods[0]["metadata"]["labels"][names.LABEL_ATTEMPT])
