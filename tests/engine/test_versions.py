"""The engine with specs and statuses that another release wrote."""

from typing import Any

import pytest

from ddpjob.engine.desired import spec_hash
from tests.builders import World, a_job, a_running_world, failed

LATER = {"compression": "none", "rendezvous": {"port": 29500, "backend": {"name": "static"}}}
"""Fields that the CRD of a later release declares; its defaults put them into every stored job."""


@pytest.fixture
def world() -> World:
    """Return a running job, after the CRD of a later release was applied."""
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"] |= LATER
    return world


def test_running_job_with_fields_of_a_later_release_is_not_touched(world: World) -> None:
    pods, status = dict(world.pods), world.status
    world.settle()
    assert world.pods == pods
    assert world.status == status


def test_failure_of_a_job_with_fields_of_a_later_release_restarts_it(world: World) -> None:
    world.set_pod(0, failed(1))
    world.settle()
    assert (world.status["attempt"], world.status["restarts"]) == (2, 1)


def test_new_job_with_fields_of_a_later_release_starts() -> None:
    world = World(a_job(**LATER))
    world.settle()
    assert len(world.pods) == 2


def test_wrong_value_of_a_known_field_is_reported_beside_an_unknown_field(world: World) -> None:
    world.job["spec"]["numNodes"] = 0
    world.settle()
    assert world.condition("Stalled")["reason"] == "InvalidSpec"
    message = world.condition("Stalled")["message"]
    assert "numNodes" in message and "compression" not in message


NEGATIVE = [
    {"restarts": -3},
    {"restartsCountedTowardsLimit": -3},
    {"activeSeconds": -9},
    {"succeededNodes": [-1]},
    {"attempt": -1},
    {"currentAttempt": {"number": 1, "phase": "Running", "startTime": "2026-03-01T12:00:00Z", "refusals": -4}},
    {"currentAttempt": {"number": 1, "phase": "Running", "startTime": "2026-03-01T12:00:00Z", "failuresInRow": -4}},
]


@pytest.mark.parametrize("edit", NEGATIVE, ids=lambda edit: next(iter(edit)))
def test_negative_number_of_an_edited_status_is_dropped(edit: dict[str, Any]) -> None:
    world = a_running_world(a_job())
    world.set_pod(0, failed(1))
    world.settle()
    world.job["status"] |= edit
    world.settle()
    for _ in range(2):
        world.run_all()
        world.settle()
        world.set_pod(0, failed(1))
        world.settle_after_backoff()
    assert world.status["restarts"] >= 0 and world.status["attempt"] >= 2


@pytest.mark.parametrize("recorded", ["0123456789abcdef", "v2:0123456789abcdef", None])
def test_digest_that_another_release_recorded_is_replaced(recorded: str | None) -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    own, pods = world.status["specHash"], dict(world.pods)
    forget(world, recorded)
    world.settle()
    assert world.status["specHash"] == own == spec_hash(world.job["spec"])
    assert world.condition("Stalled")["status"] == "False"
    assert world.pods == pods


def test_template_change_after_the_digest_was_replaced_is_detected() -> None:
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    forget(world, "0123456789abcdef")
    world.settle()
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "Default"
    world.settle()
    assert world.condition("Stalled")["reason"] == "SpecChanged"


def forget(world: World, recorded: str | None) -> None:
    status: dict[str, Any] = world.job["status"]
    status.pop("specHash")
    world.job["status"] = status | ({"specHash": recorded} if recorded else {})
