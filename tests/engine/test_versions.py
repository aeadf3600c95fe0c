"""The engine with specs and statuses that another release wrote."""

import pytest

from tests.builders import World, a_job, a_running_world

LATER = {"compression": "none", "rendezvous": {"port": 29500, "backend": {"name": "static"}}}
"""Fields that the CRD of a later release declares; its defaults put them into every stored job."""


@pytest.fixture
def world() -> World:
    """Return a running job, after the CRD of a later release was applied."""
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"] |= LATER
    return world


def test_failure_of_a_job_with_fields_of_a_later_release_restarts_it(world: World) -> None:
    world.fail(0)
    assert (world.status["attempt"], world.status["restarts"]) == (2, 1)


def test_wrong_value_of_a_known_field_is_reported_beside_an_unknown_field(world: World) -> None:
    world.job["spec"]["numNodes"] = 0
    world.settle()
    assert world.condition("Stalled")["reason"] == "InvalidSpec"
    message = world.condition("Stalled")["message"]
    assert "numNodes" in message and "compression" not in message
