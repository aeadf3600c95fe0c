"""The controller in simulated time: pods that may still write where another attempt, or another job, reads."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from tests.controller.bench import Bench, on_bench

CHECKPOINT = {"claimName": "c", "mountPath": "/c"}


def reason(bench: Bench, job: str = "mnist") -> str:
    status = (bench.cluster.store.get(names.DDPJOBS, "default", job) or {}).get("status")
    return str(condition(status, "Running")["reason"])


async def run_pods(bench: Bench, job: str) -> None:
    bench.start(bench.pods_of(job))
    await asyncio.sleep(2)


def kill(bench: Bench, pod: Json) -> None:
    """End a pod that is being deleted, as its kubelet does."""
    bench.server.delete(names.PODS, "default", pod["metadata"]["name"], grace_seconds=0)


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (CHECKPOINT, True),
        ({"claimName": "c", "mountPath": "/elsewhere"}, True),
        ({"claimName": "c", "subPath": "a"}, False),
        ({"claimName": "another"}, False),
    ],
)
@on_bench
async def test_job_waits_for_pods_of_a_deleted_one_on_the_same_claim_and_directory(
    bench: Bench, second: Json, waits: bool
) -> None:
    bench.submit("first", checkpoint=CHECKPOINT)
    await asyncio.sleep(1)
    await run_pods(bench, "first")
    bench.server.delete(names.DDPJOBS, "default", "first")
    await asyncio.sleep(1)
    bench.submit(checkpoint=second)
    await asyncio.sleep(1)
    assert bool(bench.pods(1)) is not waits
    if waits:
        assert reason(bench) == "FormerPodsRun"
    for pod in bench.pods_of("first"):
        kill(bench, pod)
    await asyncio.sleep(0.1)
    assert len(bench.pods(1)) == 2


@on_bench
async def test_two_jobs_on_one_claim_and_directory_name_each_other_as_long_as_both_run(bench: Bench) -> None:
    other: dict[str, Any] = {"checkpoint": CHECKPOINT | {"subPath": "a"}}
    bench.submit("apart", **other)
    for name in ("mnist", "second"):
        bench.submit(name, checkpoint=CHECKPOINT)
    await asyncio.sleep(1)
    for name in ("apart", "mnist", "second"):
        await run_pods(bench, name)
    found = [reason(bench, name) for name in ("apart", "mnist", "second")]
    assert found == ["AllNodesRunning", "VolumeShared", "VolumeShared"]
    assert "the job second" in condition(bench.status(), "Running")["message"]
    bench.server.delete(names.DDPJOBS, "default", "second")
    await asyncio.sleep(2)
    assert reason(bench) == "AllNodesRunning"


@on_bench
async def test_pod_of_one_of_many_jobs_on_a_claim_wakes_only_those_that_wait(bench: Bench) -> None:
    """Each loss in 500 such jobs otherwise caused 750 plans, in each of which 500 jobs were looked at."""
    for number in range(30):
        bench.submit(f"j{number}", checkpoint=CHECKPOINT)
    await asyncio.sleep(5)
    for number in range(30):
        await run_pods(bench, f"j{number}")
    bench.server.delete(names.DDPJOBS, "default", "j0")
    bench.submit(checkpoint=CHECKPOINT)
    await asyncio.sleep(5)
    assert reason(bench) == "FormerPodsRun"
    before = bench.reconciles()
    for pod in bench.pods_of("j0"):
        kill(bench, pod)
    await asyncio.sleep(1)
    assert bench.status()["attempt"] == 1
    assert bench.reconciles() - before < 25
