"""An operator that is down in the middle of a job: nothing is restarted, and deleted jobs are still collected."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from tests.injection.cluster import open_cluster, path_of
from tests.injection.runs import Run
from tests.injection.stories import succeed
from tests.worlds.control_plane import ControlPlane

pytestmark = pytest.mark.apiserver
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def in_a_run(plane: ControlPlane, test: Callable[[Run], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with open_cluster(plane) as cluster, Run(cluster, await cluster.new_namespace()) as run:
            await test(run)

    asyncio.run(whole())


def earlier(status: Json, minutes: int) -> Any:
    """Return a status whose times are earlier, as if that much time had passed since.

    The ledger of the time stays: it counts from the creation of the job, which no client can move.
    """

    def shifted(match: re.Match[str]) -> str:
        return timestamp(datetime.fromisoformat(match[0]).astimezone(UTC) - timedelta(minutes=minutes))

    return json.loads(TIME.sub(shifted, json.dumps(status))) | {"time": status["time"]}


def test_operator_that_was_down_for_minutes_restarts_nothing(collecting_plane: ControlPlane) -> None:
    """While it is down, the times in the status are moved back by more than the job's deadlines."""

    async def test(run: Run) -> None:
        await run.create_job(progressDeadlineSeconds=30, startupDeadlineSeconds=60)
        pods = await run.running_attempt()
        await run.quiet()
        run.operator.kill()
        job = run.job() or {}
        body = {"status": earlier(job["status"], 2)}
        await run.cluster.request("PATCH", f"{path_of(names.DDPJOBS, job)}/status", body)
        run.operator.start(wait=False)
        await goes_on(run, pods)

    in_a_run(collecting_plane, test)


async def goes_on(run: Run, pods: dict[int, Json]) -> None:
    """Check that the job still has these pods when the operator handles it again, and let it succeed."""
    await run.patch_job(activeDeadlineSeconds=100_000)
    generation = (run.job() or {})["metadata"]["generation"]
    await run.until("the operator is back", lambda: run.status().get("observedGeneration") == generation)
    await run.quiet()
    assert {rank: pod["metadata"]["uid"] for rank, pod in run.pods().items()} == {
        rank: pod["metadata"]["uid"] for rank, pod in pods.items()
    }
    await succeed(run)
    outcome = run.outcome()
    assert (outcome["state"], outcome["attempt"], outcome["restarts"], outcome["failures"]) == ("Succeeded", 1, 0, [])
    assert {what: n for what, n in outcome["made"].items() if "Pod" in what} == {"ADDED Pod 1-0": 1, "ADDED Pod 1-1": 1}


def test_job_deleted_while_no_operator_runs_is_collected(collecting_plane: ControlPlane) -> None:
    async def test(run: Run) -> None:
        await run.create_job()
        await run.running_attempt()
        await run.quiet()
        run.operator.kill()
        job = run.job() or {}
        await run.cluster.request("DELETE", path_of(names.DDPJOBS, job))
        await run.until("its pods are gone", lambda: not run.all_pods())
        await run.until("its Service is gone", lambda: not run.cluster.history.objects(names.SERVICES, run.namespace))
        writes = len(run.writes)
        run.operator.start(wait=False)
        await run.create_job()
        await run.running_attempt()
        assert not [write for write in run.writes[writes:] if write.startswith("DELETE")]
        uid = (run.job() or {})["metadata"]["uid"]
        assert {pod["metadata"]["labels"][names.LABEL_JOB_UID] for pod in run.all_pods()} == {uid}

    in_a_run(collecting_plane, test)
