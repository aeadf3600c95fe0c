"""Gangs of which only some pods have a Kubernetes node: what is recorded, which job gives its nodes back, and when."""

from typing import Any

import pytest

from ddpjob.api.times import timestamp
from tests.builders import World, a_job, ended, running


def a_partial_world(**spec: Any) -> World:
    """Return a job of which only rank 0's pod has a Kubernetes node."""
    world = World(a_job(**spec))
    world.settle()
    place(world, 0)
    world.settle()
    return world


def place(world: World, *ranks: int) -> None:
    for rank in ranks:
        world.pod(rank)["spec"] |= {"nodeName": f"worker-{rank}"}


def attempt(world: World) -> dict[str, Any]:
    return dict(world.status["currentAttempt"])


def test_it_is_recorded_since_when_only_some_pods_have_a_node() -> None:
    world = World(a_job())
    world.settle()
    world.forward(100)
    world.settle()
    assert "partialSince" not in attempt(world)
    place(world, 0)
    since = timestamp(world.now)
    world.settle()
    world.forward(50)
    world.settle()
    assert attempt(world)["partialSince"] == since
    place(world, 1)
    world.settle()
    assert "partialSince" not in attempt(world)
    world.run_all()
    world.settle()
    assert world.status["state"] == "Running"


@pytest.mark.parametrize("ending", ["suspended", "failed", "deleted"])
def test_the_record_ends_with_the_attempt(ending: str) -> None:
    world = a_partial_world()
    assert "partialSince" in attempt(world)
    match ending:
        case "suspended":
            world.job["spec"]["suspend"] = True
        case "failed":
            world.set_pod(0, ended(1))
            world.forward(11)
        case "deleted":
            del world.pods[world.pod(1)["metadata"]["name"]]
    world.settle_after_backoff()
    assert "partialSince" not in attempt(world)


def test_a_gang_that_ran_is_never_partial_again() -> None:
    world = a_partial_world()
    world.run_all()
    world.settle()
    world.pod(1)["spec"].pop("nodeName")
    world.settle()
    assert "partialSince" not in attempt(world)


def test_a_clock_that_was_set_back_begins_again() -> None:
    world = a_partial_world()
    world.forward(-1000)
    world.settle()
    assert attempt(world)["partialSince"] == timestamp(world.now)


def test_the_priority_of_the_pods_is_recorded_with_it() -> None:
    world = World(a_job())
    world.settle()
    for rank in range(2):
        world.pod(rank)["spec"]["priority"] = -7
    place(world, 0)
    world.settle()
    assert attempt(world)["podPriority"] == -7
    assert "podPriority" not in attempt(a_partial_world())
    single = World(a_job(numNodes=1))
    single.settle()
    single.set_pod(0, running())
    single.settle()
    assert "partialSince" not in attempt(single)
