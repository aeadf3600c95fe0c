"""Gangs of which only some pods have a Kubernetes node: what is recorded, which job gives its nodes back, and when."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api.times import seconds_since, timestamp
from ddpjob.engine.observed import Elder
from ddpjob.engine.scheduling.guard import standing
from tests.builders import NOW, World, a_job, a_started_world, ended, running


def a_partial_world(**spec: Any) -> World:
    """Return a job of which only rank 0's pod has a Kubernetes node."""
    world = a_started_world(a_job(**spec))
    place(world, 0)
    return world


def place(world: World, *ranks: int) -> None:
    for rank in ranks:
        world.pod(rank)["spec"] |= {"nodeName": f"worker-{rank}"}
    world.settle()


def attempt(world: World) -> dict[str, Any]:
    return dict(world.status["currentAttempt"])


def test_it_is_recorded_since_when_only_some_pods_have_a_node() -> None:
    world = a_started_world(a_job())
    world.later(100)
    assert "partialSince" not in attempt(world)
    place(world, 0)
    since = timestamp(world.now)
    world.settle()
    world.later(50)
    assert attempt(world)["partialSince"] == since
    place(world, 1)
    assert "partialSince" not in attempt(world)
    world.run_all_and_settle()
    assert world.status["state"] == "Running"


def test_the_priority_of_the_pods_is_recorded_with_it() -> None:
    world = a_started_world(a_job())
    for rank in range(2):
        world.pod(rank)["spec"]["priority"] = -7
    place(world, 0)
    assert attempt(world)["podPriority"] == -7
    assert "podPriority" not in attempt(a_partial_world())
    single = a_started_world(a_job(numNodes=1))
    single.show(0, running())
    assert "partialSince" not in attempt(single)


RIVAL = Elder("default", "older", timestamp(NOW))
STRANGER = Elder("other-tenant", "secret", timestamp(NOW))


def verdict(world: World) -> str | None:
    ending = attempt(world).get("ending") or {}
    return ending.get("verdict")


def left(world: World) -> float:
    """Return the seconds until the next plan."""
    (made,) = [world.reconcile()]
    assert made.requeue_after is not None
    return made.requeue_after


def test_without_a_rival_no_pod_is_deleted_for_five_times_as_long() -> None:
    world = a_partial_world(restartPolicy={"maxRestarts": 0})
    world.later(10)
    assert left(world) == 1490
    world.later(1489)
    assert verdict(world) is None and len(world.pods) == 2
    world.later(1)
    assert verdict(world) == "PartiallyScheduled" and not world.pods
    assert (world.status["state"], world.status["restarts"], attempt(world)["yields"]) == ("Queued", 0, 1)
    world.later(10)
    assert (world.status["attempt"], len(world.pods), attempt(world)["yields"]) == (2, 2, 1)


def test_younger_job_yields_and_starts_when_no_elder_is_partial() -> None:
    world = a_partial_world(restartPolicy={"maxRestarts": 0})
    world.elder = RIVAL
    world.later(299)
    assert verdict(world) is None and left(world) == 1
    world.forward(1)
    events = world.reconcile().events
    assert verdict(world) == "YieldedTo" and [note.reason for note in events] == ["YieldedTo"]
    assert "job older waits for nodes, too" in attempt(world)["ending"]["message"]
    for condition in ("Running", "Scheduled"):
        assert world.condition(condition)["reason"] == "YieldedTo"
    world.settle()
    assert not world.pods and world.status["state"] == "Queued"
    assert (world.status["restarts"], world.status.get("failures")) == (0, None)
    world.elder = None
    world.settle()
    assert (world.status["attempt"], len(world.pods)) == (2, 2)


def test_backoff_doubles_until_all_pods_run() -> None:
    world = a_partial_world(scheduling={"partialGangSeconds": 60})
    waited = []
    for number in range(1, 9):
        world.elder = RIVAL
        world.later(60)
        assert verdict(world) == "YieldedTo" and attempt(world)["yields"] == number
        waited.append(-seconds_since(attempt(world)["ending"]["until"], world.now))
        world.later(waited[-1] - 1)
        assert verdict(world) == "YieldedTo"
        world.later(1)
        assert world.status["attempt"] == number + 1
        place(world, 0)
    for longest, seconds in zip((10, 20, 40, 80, 160, 320, 600, 600), waited, strict=True):
        assert longest * 0.75 <= seconds <= longest + 1
    assert waited[-1] != waited[-2]  # by the jitter
    world.run_all_and_settle()
    assert "yields" not in attempt(world) and world.status["restarts"] == 0


def test_the_time_as_the_first_job_is_counted_over_attempts_and_suspensions_until_all_pods_run() -> None:
    """Others yield to it for a limited time, which neither a new attempt nor an edit may begin again."""
    world = a_partial_world()
    world.elder = RIVAL
    world.later(300)
    assert verdict(world) == "YieldedTo" and "elderSeconds" not in attempt(world)
    world.elder = None
    world.settle()
    for expected in (1500, 3000):
        place(world, 0)
        world.later(1500)
        assert verdict(world) == "PartiallyScheduled" and attempt(world)["elderSeconds"] == expected
        world.later(601)
    place(world, 0)
    world.forward(100)
    world.edit(suspend=True)
    world.suspend(False)
    assert attempt(world)["elderSeconds"] == 3100 and attempt(world)["phase"] != "Ending"
    world.run_all_and_settle()
    assert "elderSeconds" not in attempt(world)


def test_zero_keeps_the_nodes() -> None:
    world = a_partial_world(scheduling={"partialGangSeconds": 0})
    world.elder = RIVAL
    world.later(100_000)
    assert verdict(world) is None and "partialGangSeconds is 0" in world.condition("Scheduled")["message"]


def test_an_elder_job_that_has_just_become_partial_is_given_time() -> None:
    """A scheduler places the pods of each job one by one."""
    world = a_partial_world()
    world.forward(1000)
    world.elder = replace(RIVAL, since=timestamp(world.now))
    world.settle()
    assert verdict(world) is None and left(world) == 10
    world.later(10)
    assert verdict(world) == "YieldedTo"


@pytest.mark.parametrize("crash_after", [0, 1, 2])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_crash_at_any_write_of_a_yield_changes_nothing(crash_after: int, restarts: bool) -> None:
    world = a_partial_world()
    world.elder = RIVAL
    world.forward(300)
    world.reconcile(crash_after=crash_after)
    if restarts:  # an operator that has not yet seen the other job
        world.elder = None
    world.settle()
    if not restarts:
        assert verdict(world) == "YieldedTo" and not world.pods
        world.elder = None
        world.settle()
    made = 1 if restarts and not crash_after else 2
    assert world.status["attempt"] == made and world.attempts() == [str(made)]
    assert (world.status["restarts"], len(world.pods)) == (0, 2)


def test_the_names_of_other_tenants_are_not_shown() -> None:
    world = a_partial_world()
    world.elder = STRANGER
    world.later(20)
    shown = world.condition("Running")["message"]
    assert world.condition("Running")["reason"] == "PartiallyScheduled" and "in another namespace" in shown
    world.forward(280)
    events = world.reconcile().events
    texts = [shown, attempt(world)["ending"]["message"], *(note.message for note in events), str(world.status)]
    assert not any("secret" in text or "other-tenant" in text for text in texts)


def test_a_partial_gang_is_shown_with_the_schedulers_message_and_what_follows() -> None:
    world = a_partial_world()
    refusal = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are free"}
    world.pod(1)["status"]["conditions"] = [refusal]
    world.settle()
    assert world.condition("Scheduled")["reason"] == "Unschedulable"
    world.forward(10)
    assert [note.reason for note in world.reconcile().events] == ["PartiallyScheduled"]
    message = world.condition("Scheduled")["message"]
    assert message == world.condition("Running")["message"]
    for part in ("1 of 2 pods", "since 2026-03-01T12:00:00Z", "0/3 nodes are free", "12:05:00Z", "12:25:00Z"):
        assert part in message
    world.elder = RIVAL
    world.settle()
    text = "job older waits for nodes, too, so the pods give theirs back at 2026-03-01T12:05:00Z"
    assert text in world.condition("Running")["message"]


def test_startup_deadline_counts_all_attempts_that_gave_their_nodes_back() -> None:
    world = a_partial_world(startupDeadlineSeconds=1000, scheduling={"partialGangSeconds": 300})
    world.elder = RIVAL
    for _ in range(3):
        world.later(300)
        assert verdict(world) == "YieldedTo"
        world.elder = None
        world.settle()
        place(world, 0)
        world.elder = RIVAL
    world.later(100)
    assert world.status["state"] == "Failed" and verdict(world) == "StartupDeadlineExceeded"


@pytest.mark.parametrize(
    ("peer", "counts"),
    [
        ({"node": None}, False),
        ({"startTime": timestamp(NOW + timedelta(seconds=100))}, False),
        ({"startTime": timestamp(NOW)}, True),
    ],
)
def test_rendezvous_timeout_counts_only_if_the_peers_had_the_time(peer: dict[str, Any], counts: bool) -> None:
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 1}))
    world.set_pod(0, running())
    node = peer.pop("node", "worker")
    world.show(1, {"phase": "Pending"} | peer, node=node)
    world.forward(650)
    world.fail(0, 69, at=world.now)
    assert world.status["restartsCountedTowardsLimit"] == int(counts)
    assert verdict(world) == (None if counts else "PeersNotPlaced")


@pytest.mark.parametrize(("ran_for", "counts"), [(5, True), (400, False)])
def test_program_without_a_report_that_waited_for_peers_costs_no_restart(ran_for: int, counts: bool) -> None:
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 1}))
    world.show(0, running())
    world.forward(ran_for)
    world.show(0, ended(1, started=NOW, at=world.now))
    world.later(4)
    assert world.status["restartsCountedTowardsLimit"] == int(counts)


def test_no_job_yields_to_one_whose_record_is_not_kept() -> None:
    world = a_partial_world()
    assert standing(world.job) is not None
    status = copy.deepcopy(world.job["status"])
    assert standing(world.job | {"status": status | {"state": "Invalid"}}) is None
