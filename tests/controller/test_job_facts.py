"""What a scrape says about the jobs, from statuses that the operator writes, and from spoiled ones."""

import copy
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.job_facts import facts_of
from ddpjob_operator.controller.metrics import Metrics
from tests.builders import NOW, World, a_job
from tests.engine.queued import Queued

STALL = {"rank": 1, "step": 5, "where": "train.py:9", "message": "stalled"}


def scrape(*jobs: Json, now: datetime = NOW, per_job: bool = False) -> dict[str, float]:
    """Return the gauges about these jobs, by name and labels without the namespace."""
    cache, metrics = Cache(), Metrics()
    metrics.jobs(cache.job_facts, per_job=per_job, now=now.timestamp)
    for number, job in enumerate(jobs):
        meta = {"uid": str(number), "name": f"{job['metadata']['name']}-{number}"}
        cache.put(names.DDPJOBS, job | {"metadata": job["metadata"] | meta})
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples if family.type == "gauge" else ():
            labels = [value for label, value in sample.labels.items() if label != "namespace"]
            found[" ".join([sample.name.removeprefix("ddpjob_"), *labels])] = sample.value
    return {name: value for name, value in found.items() if name != "event_loop_lag_seconds"}


def created(world: World) -> World:
    world.job["metadata"]["creationTimestamp"] = timestamp(world.now)
    return world


def trained(world: World, **report: Any) -> World:
    """Let the job run for a minute, and report step 30 and a checkpoint."""
    world.settle()
    world.run_all_and_settle()
    world.forward(60)
    world.report({"step": 30, "totalSteps": 90, "checkpoint": {"step": 20, "path": "20.pt"}} | report)
    world.settle()
    return world


def test_a_job_waits_for_quota_then_for_its_pods_then_trains() -> None:
    world: Any = created(Queued())
    world.settle()
    world.forward(500)
    assert scrape(world.job, now=world.now) == {"jobs Queued": 1, "longest_wait_seconds quota": 500}
    world.admitted()
    world.forward(40)
    assert scrape(world.job, now=world.now) == {"jobs Pending": 1, "longest_wait_seconds pods": 40}
    trained(world)
    world.forward(200)
    found = scrape(world.job, now=world.now, per_job=True)
    assert found == {
        "jobs Running": 1,
        "checkpoint_age_seconds": 200,
        "job_state mnist-0 Running": 1,
        "job_step mnist-0": 30,
        "job_goodput mnist-0": pytest.approx(200 / 300),  # the minute before the first report was the start
        "job_checkpoint_age_seconds mnist-0": 200,
    }


def test_a_queue_that_admits_nothing_and_a_resumed_job_are_told_apart_from_long_waits() -> None:
    world = created(Queued(kueue=False))
    world.settle()
    world.forward(9)
    assert scrape(world.job, now=world.now)["longest_wait_seconds queue"] == 9
    world = created(World(a_job(suspend=True)))
    world.settle()
    world.forward(9000)
    assert scrape(world.job, now=world.now) == {"jobs Suspended": 1}
    world.suspend(False)
    world.forward(5)
    assert scrape(world.job, now=world.now)["longest_wait_seconds pods"] == 5


def test_stalls_and_fruitless_restarts_are_counted_until_the_job_ends() -> None:
    world = trained(created(World(a_job(restartPolicy={"maxRestarts": 2}))), stall=STALL)
    assert scrape(world.job)["stalled_jobs training"] == 1
    for restarts in (1, 2):
        world.fail(1)
        world.settle_after_backoff()
        world.run_all_and_settle()
        assert scrape(world.job)["restarts_without_progress"] == restarts
    world.fail(1)
    world.settle()
    assert scrape(world.job) == {"jobs Failed": 1}
    refused = a_job(status={"state": "Invalid", "conditions": [{"type": "Stalled", "status": "True"}]})
    assert scrape(created(World(refused)).job) == {"jobs Invalid": 1, "stalled_jobs job": 1}


def test_gauges_of_a_namespace_are_the_counts_and_the_worst_of_its_jobs() -> None:
    parts: list[Any] = ["queue", "queue", "made up", ["x"], None]
    jobs = [a_job(status={"slow": {"part": part}, "state": state}) for part in parts for state in ("Running", ["x"])]
    found = scrape(*jobs, a_job(status={"slow": "spoiled"}))
    assert found == {"jobs Running": 5, "jobs Other": 5, "jobs New": 1, "slow_jobs queue": 4, "slow_jobs Other": 6}
    world = trained(created(World(a_job())))
    other = copy.deepcopy(world.job)
    other["status"]["checkpoint"]["time"] = timestamp(world.now + timedelta(seconds=30))
    assert scrape(world.job, other, now=world.now + timedelta(seconds=90))["checkpoint_age_seconds"] == 90


SPOILED = (None, True, -1, 10**400, 0.5, "x", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59Z", [], [[]], {})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a JSON object."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def waits(world: World) -> None:
    world.settle()


def stalls(world: World) -> None:
    trained(world, stall=STALL)


def restarts(world: World) -> None:
    trained(world).fail(1)
    world.settle()


@pytest.mark.parametrize("live", [waits, stalls, restarts])
def test_a_spoiled_status_stops_no_scrape_and_shows_no_time_longer_than_the_job_is_old(
    live: Callable[[World], None],
) -> None:
    world = created(Queued(kueue=live is waits or None))
    live(world)
    metrics, job = Metrics(), world.job
    metrics.jobs(lambda: [("default", "mnist", facts_of(job))], per_job=True, now=lambda: NOW.timestamp() + 600)
    for path in list(places({"status": world.status}))[1:]:
        for value in SPOILED:
            job = world.job | {"status": copy.deepcopy(world.status)}
            inner: Any = job
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            shown = re.findall(
                r"^ddpjob_(job\w+|\w+_seconds|\w+_progress)\{.*\} (\S+)$", metrics.render().decode(), re.M
            )
            assert shown and all(0 <= float(number) <= 600 for _, number in shown), (path, value, shown)


@pytest.mark.parametrize(
    "before",
    [{}, {"asOf": "0001-01-01T00:00:00Z"}, {"training": "x"}, {"training": 10**9}, {"training": 500}, "spoiled", None],
    ids=str,
)
def test_a_spoiled_ledger_adds_no_more_to_the_namespace_than_the_operator_counted(before: Any) -> None:
    world, metrics = trained(created(World(a_job()))), Metrics()
    spoiled = world.status["time"] | before if isinstance(before, dict) else before
    world.job["status"] = world.status | {"time": spoiled}
    for step in (40, 50):
        known = world.status
        world.forward(30)
        world.report({"step": step, "totalSteps": 90})
        world.settle()
        metrics.observe_status(world.job, known, world.status)
    counted = [s for family in metrics.time_spent.collect() for s in family.samples if s.name.endswith("_total")]
    assert sum(sample.value for sample in counted) <= 60
    assert {sample.labels["namespace"] for sample in counted} <= {"default"}


def test_a_scrape_of_a_thousand_jobs_takes_less_than_20_ms_and_decodes_none() -> None:
    cache, metrics = Cache(), Metrics()
    metrics.jobs(cache.job_facts)
    job = trained(created(World(a_job()))).job
    for number in range(1000):
        meta = {"name": f"job-{number}", "uid": str(number), "namespace": f"team-{number % 20}"}
        cache.put(names.DDPJOBS, job | {"metadata": job["metadata"] | meta})
    times = []
    for _ in range(5):
        begin = time.thread_time()
        text = metrics.render().decode()
        times.append(time.thread_time() - begin)
    assert 'ddpjob_jobs{namespace="team-7",state="Running"} 50.0' in text
    assert min(times) < 0.02, times
