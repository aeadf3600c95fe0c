"""Jobs whose creates a ResourceQuota refused: when a pod of the namespace goes, the next ones try at once."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Forbidden
from ddpjob_operator.controller.refused_jobs import PACE_SECONDS, TRIES, RefusedJobs
from tests.builders import ended
from tests.controller.bench import Bench, now, on_bench
from tests.controller.faketime import run


def limit_pods(bench: Bench, quota: int) -> list[str]:
    """Refuse pods beyond a ResourceQuota; the list gets the name of each refused pod."""
    create, refused, sent = bench.cluster.create, list[str](), set[str]()

    async def within_quota(resource: Resource, namespace: str, body: Json) -> Json:
        if resource is not names.PODS:
            return await create(resource, namespace, body)
        phases = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in bench.cluster.store.all(names.PODS)}
        alive = {name for name, phase in phases.items() if phase in ("Pending", "Running")}
        name = body["metadata"]["name"]
        if len(alive | sent) >= quota:
            refused.append(name)
            raise Forbidden("exceeded quota: gpus", code=403)
        sent.add(name)
        try:
            return await create(resource, namespace, body)
        finally:
            sent.remove(name)

    bench.cluster.create = within_quota  # type: ignore[method-assign]
    return refused


def attempt_of(bench: Bench, job: str) -> int:
    found = bench.cluster.store.get(names.DDPJOBS, "default", job)
    return int(found["status"]["attempt"]) if found else 0


@pytest.mark.parametrize("restarts", [False, True], ids=["same-process", "operator-restarted"])
@pytest.mark.parametrize("end", ["succeeds", "is-deleted"])
@on_bench
async def test_freed_quota_is_used_within_seconds(bench: Bench, end: str, restarts: bool) -> None:
    limit_pods(bench, 2)
    bench.submit("first")
    await asyncio.sleep(1)
    bench.start(bench.pods_of("first"))
    for job in ("second", "third"):
        bench.submit(job)
    await asyncio.sleep(1500)
    if restarts:
        await bench.restart()
        await asyncio.sleep(5)
    tries = [attempt_of(bench, job) for job in ("second", "third")]
    for pod in bench.pods_of("first"):
        if end == "succeeds":
            bench.report(pod, ended(0, at=now()))
        else:
            bench.server.delete(names.PODS, "default", pod["metadata"]["name"], grace_seconds=0)
    if end == "is-deleted":
        bench.server.delete(names.DDPJOBS, "default", "first")
    await asyncio.sleep(8)
    (winner,) = (job for job in ("second", "third") if len(bench.pods_of(job)) == 2)
    bench.start(bench.pods_of(winner))
    await asyncio.sleep(60)
    assert sum(attempt_of(bench, job) for job in ("second", "third")) - sum(tries) <= 2 * TRIES


@on_bench
async def test_job_gets_the_quota_of_its_own_old_pods_when_these_have_ended(bench: Bench) -> None:
    limit_pods(bench, 2)
    bench.submit("mnist")
    await asyncio.sleep(1)
    bench.start(bench.pods_of("mnist"))
    await asyncio.sleep(10)
    first, second = bench.pods_of("mnist")
    bench.report(first, ended(1, at=now()))
    await asyncio.sleep(500)
    assert len(bench.pods_of("mnist")) == 2, "a peer has not ended, so one of two new pods is refused"
    bench.server.delete(names.PODS, "default", second["metadata"]["name"], grace_seconds=0)
    await asyncio.sleep(8)
    assert len(bench.pods(attempt_of(bench, "mnist"))) == 2


@on_bench
async def test_waiting_gangs_that_hold_a_part_of_the_quota_do_not_wake_each_other(bench: Bench) -> None:
    refused = limit_pods(bench, 3)
    for number in range(4):
        bench.submit(f"gang-{number}", numNodes=4)
    await asyncio.sleep(1800)
    known = len(refused)
    await asyncio.sleep(3600)
    assert len(refused) - known < 4 * 10, "one try of each job in ten minutes"


def test_many_pods_that_go_cost_a_thousand_waiting_jobs_a_few_tries() -> None:
    async def test() -> None:
        woken: list[str] = []
        jobs = RefusedJobs(lambda key: woken.append(key.name))
        for number in range(1000):
            jobs.observe(Key("default", f"j{number}"), refused(1))
        for _ in range(1000):
            jobs.freed(Key("default", "big"), 1)
        assert not woken
        await asyncio.sleep(100)
        assert woken == [f"j{number}" for number in range(TRIES)], "the others are next"
        jobs.freed(Key("default", "big"), 1)
        await asyncio.sleep(PACE_SECONDS * 1.5)
        assert woken[TRIES:] == [f"j{TRIES}"]
        jobs.freed(Key("other", "big"), 1)

    run(test())


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"currentAttempt": "spoiled"},
        {"currentAttempt": {"number": 1, "ending": "spoiled"}},
        {"currentAttempt": {"number": 2, "phase": "Creating", "startTime": "2026-03-01T12:00:00Z"}},
    ],
)
def test_only_a_job_whose_creates_were_refused_is_woken(status: dict[str, Any]) -> None:
    async def test() -> None:
        woken: list[str] = []
        jobs = RefusedJobs(lambda key: woken.append(key.name))
        jobs.observe(Key("default", "a"), refused(7, 3))
        jobs.freed(Key("default", "a"), 5)
        await asyncio.sleep(100)
        assert not woken, "its own pods of refused attempts free nothing for it"
        jobs.freed(Key("default", "a"), 4)
        await asyncio.sleep(100)
        assert woken == ["a"] * TRIES
        jobs.observe(Key("default", "a"), status)
        jobs.freed(Key("default", "b"), 1)
        await asyncio.sleep(100)
        assert len(woken) == TRIES

    run(test())


def refused(number: int, refusals: int = 1) -> Json:
    since = "2026-03-01T12:00:00Z"
    attempt = {"number": number, "phase": "Ending", "startTime": since, "refusals": refusals}
    return {"currentAttempt": attempt | {"ending": {"verdict": "CreateRefused", "since": since}}}
