"""Counters of what happened to the jobs, from the statuses that the operator wrote."""

import re

from ddpjob.api.times import timestamp
from ddpjob_operator.controller.metrics import Metrics
from tests.builders import World, a_job, a_running_world, ended, failed


def samples(metrics: Metrics) -> dict[str, float]:
    """Return the counters and sums that are not 0."""
    counted = re.compile(r"(ddpjob_(?:attempts|failures|restarts|restarts_in_place)_(?:total|sum|count)\S*) (\S+)")
    found = map(counted.fullmatch, metrics.render().decode().splitlines())
    return {match[1]: float(match[2]) for match in found if match and float(match[2])}


def settle(world: World, metrics: Metrics) -> None:
    """Reconcile until nothing changes, as the operator does, with the metrics."""
    for _ in range(20):
        before = world.status
        world.reconcile()
        if world.status == before:
            return
        metrics.observe_status(world.job, before, world.status)


def test_a_recovery_counts_attempts_failure_restart_and_time_once() -> None:
    metrics, world = Metrics(), World(a_job())
    settle(world, metrics)
    world.run_all()
    settle(world, metrics)
    assert samples(metrics) == {"ddpjob_attempts_total": 1}
    world.set_pod(1, ended(137, reason="OOMKilled"))
    settle(world, metrics)
    world.forward(30)
    world.run_all()
    settle(world, metrics)
    world.progress = {"step": 7}, world.pod(0)["metadata"]["name"]
    settle(world, metrics)
    world.forward(30)
    world.progress = {"step": 9}, world.pod(0)["metadata"]["name"]
    settle(world, metrics)
    assert samples(metrics) == {
        "ddpjob_attempts_total": 2,
        'ddpjob_failures_total{reason="OOMKilled"}': 1,
        'ddpjob_restarts_total{counted="true"}': 1,
    }


def test_restarts_in_place_are_counted_once() -> None:
    metrics, world = Metrics(), a_running_world(a_job())
    life = {"life": 1, "kind": "Killed", "message": "m", "progressed": True}
    for lives in ([life], [life | {"recoveryMilliseconds": 250}]):
        world.progress = {"step": 7, "life": 2, "lives": lives}, world.pod(0)["metadata"]["name"]
        settle(world, metrics)
    assert samples(metrics) == {"ddpjob_restarts_in_place_total": 1}


def test_a_reason_that_a_tenant_makes_up_adds_no_label() -> None:
    metrics, world = Metrics(), a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.set_pod(1, failed(exception="MyOwnError", message="x"))
    settle(world, metrics)
    assert world.status["failures"][-1]["reason"] == "MyOwnError"
    assert samples(metrics) == {'ddpjob_failures_total{reason="Other"}': 1}


def test_time_is_counted_by_category_once_and_never_goes_down() -> None:
    metrics, world = Metrics(), World(a_job())
    world.job["metadata"]["creationTimestamp"] = timestamp(world.now)
    pod = ""
    for seconds, more in ((5, {}), (10, {"step": 0}), (20, {"step": 1}), (60, {"step": 9}), (1, {"savingSeconds": 21})):
        world.forward(seconds)
        if more:
            pod = world.pod(0)["metadata"]["name"]
            world.run_all()
            world.progress = {"totalSteps": 99, "step": 9} | more, pod
        settle(world, metrics)
    # The last save took 20 s that were counted as training already.
    assert time_spent(metrics) == {"queued": 5, "scheduling": 10, "starting": 20, "training": 60, "saving": 21}
    world.forward(100)
    world.progress = {"totalSteps": 99, "step": 50, "savingSeconds": 21}, pod
    settle(world, metrics)
    assert time_spent(metrics)["training"] == 140 and sum(time_spent(metrics).values()) == 196


def time_spent(metrics: Metrics) -> dict[str, float]:
    """Return the seconds of the categories that have some."""
    family = next(family for family in metrics.time_spent.collect())
    counted = ((sample.labels["category"], sample.value) for sample in family.samples if sample.name.endswith("_total"))
    return {category: seconds for category, seconds in counted if seconds}


def test_counters_and_histograms_have_no_series_of_the_time_of_their_creation() -> None:
    """Seen: 41 of 413 series of /metrics were `_created`."""
    metrics = Metrics()
    metrics.observe_request("get", "pods", "200", 0.1)
    lines = metrics.render().decode().splitlines()
    assert any(line.startswith("ddpjob_api_request_duration_seconds_count{") for line in lines)
    assert not [line for line in lines if "_created" in line]
