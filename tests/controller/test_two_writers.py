"""The controller in simulated time: pods that may still write where another attempt, or another job, reads."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from tests.builders import ended, running
from tests.controller.bench import Bench, now, on_bench

CHECKPOINT = {"claimName": "c", "mountPath": "/c"}


def pods(bench: Bench, job: str) -> list[Json]:
    return [p for p in bench.cluster.store.all(names.PODS) if p["metadata"]["labels"][names.LABEL_JOB_NAME] == job]


def attempts(bench: Bench, job: str = "mnist") -> set[str]:
    return {pod["metadata"]["labels"][names.LABEL_ATTEMPT] for pod in pods(bench, job)}


def reason(bench: Bench, job: str = "mnist") -> str:
    status = (bench.cluster.store.get(names.DDPJOBS, "default", job) or {}).get("status")
    return str(condition(status, "Running")["reason"])


async def run_pods(bench: Bench, job: str) -> None:
    for pod in pods(bench, job):
        bench.server.bind("default", pod["metadata"]["name"], "worker-1")
        bench.report(pod, running(podIP="192.0.2.1"))
    await asyncio.sleep(2)


def kill(bench: Bench, pod: Json) -> None:
    """End a pod that is being deleted, as its kubelet does."""
    bench.server.delete(names.PODS, "default", pod["metadata"]["name"], grace_seconds=0)


@on_bench
async def test_next_attempt_follows_the_end_of_a_pod_whose_grace_a_webhook_has_raised(bench: Bench) -> None:
    def mutate(resource: Resource, obj: Json) -> None:
        if resource is names.PODS:
            obj["spec"]["terminationGracePeriodSeconds"] = 600

    bench.server.mutate = mutate
    await bench.run_job(checkpoint=CHECKPOINT)
    one, other = bench.pods(1)
    bench.report(other, ended(1, at=now(), message="RuntimeError: boom"))
    await asyncio.sleep(590)
    assert attempts(bench) == {"1"} and reason(bench) == "EarlierPodsRun"
    kill(bench, one)
    await asyncio.sleep(0.1)
    assert attempts(bench) == {"1", "2"}, "no fixed wait: the pod's end starts the next attempt"
    assert {pod["metadata"]["name"] for pod in pods(bench, "mnist")} >= {other["metadata"]["name"]}


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
    for pod in pods(bench, "first"):
        kill(bench, pod)
    await asyncio.sleep(0.1)
    assert len(bench.pods(1)) == 2


@pytest.mark.parametrize("name", ["mnist", "another"])
@on_bench
async def test_job_waits_without_limit_for_pods_that_lost_their_owner(bench: Bench, name: str) -> None:
    """``kubectl delete --cascade=orphan``, and then apply."""
    bench.submit(name, checkpoint=CHECKPOINT)
    await asyncio.sleep(1)
    await run_pods(bench, name)
    old = pods(bench, name)
    for pod in old:
        bench.server.patch(names.PODS, "default", pod["metadata"]["name"], {"metadata": {"ownerReferences": None}})
    bench.server.delete(names.DDPJOBS, "default", name)
    bench.submit(checkpoint=CHECKPOINT)
    await asyncio.sleep(7200)
    assert reason(bench) == "FormerPodsRun" and not bench.status().get("attempt")
    for pod in old:
        kill(bench, pod)
    await asyncio.sleep(0.1)
    assert bench.status()["attempt"] == 1


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
    for pod in pods(bench, "j0"):
        kill(bench, pod)
    await asyncio.sleep(1)
    assert bench.status()["attempt"] == 1
    assert bench.reconciles() - before < 25
