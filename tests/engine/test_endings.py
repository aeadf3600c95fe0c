"""How an attempt ends: the cause does not depend on the order of the reports, and every phase survives a crash."""

import itertools
import random
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import NAME_TERMINATING, Problem
from tests.builders import DELETING, NOW, World, a_job, a_running_world, disrupted, ended, failed, is_idle, running

Status = dict[str, Any]
PEER = failed(77, cause="peer", rank=0, message="connection closed by peer")
LATER = NOW + timedelta(seconds=2)
DISRUPTED = disrupted("TerminationByKubelet")
EVICTED = DISRUPTED | {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
# One pod gets SIGTERM, and the trainers of all pods stop after the same step; they report it in any order.
STOPPED = failed(75, kind="Stopped", outcome="stopped", saved=True, message="saved step 9")
SHUT_DOWN = {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}
# Per fault: what the culprit's pod reports, what the other pods report, and the reason to record.
FAULTS: dict[str, tuple[Status, Status, str]] = {
    "exception": (failed(1, kind="ValueError", rank=5, message="bad"), PEER, "ValueError"),
    "hang": (failed(76, kind="Hang", message="no step for 60 s"), PEER, "Hang"),
    "out of memory": (ended(137, reason="OOMKilled"), PEER, "OOMKilled"),
    "out of memory, with report": (ended(137, reason="OOMKilled", message="{}"), PEER, "OOMKilled"),
    "killed": (ended(137), PEER, "SIGKILL"),
    "crashed": (ended(139), PEER, "SIGSEGV"),
    "evicted": (EVICTED, PEER, "Evicted"),
    "evicted after SIGTERM": (STOPPED | EVICTED, STOPPED, "Evicted"),
    "node shut down": (STOPPED | SHUT_DOWN | DISRUPTED, STOPPED, "NodeShutdown"),
    "torchrun": (ended(1, at=NOW), ended(1, at=LATER), "Error"),
    "aborted peers": (ended(1, at=LATER), ended(134, at=LATER + timedelta(seconds=1)), "Error"),
}  # fmt: skip


def orders(nodes: int) -> Iterable[tuple[int, ...]]:
    """Return all orders of up to four reports, and 12 random ones of more."""
    if nodes <= 4:
        return itertools.permutations(range(nodes))
    dice = random.Random(nodes)
    return [tuple(dice.sample(range(nodes), nodes)) for _ in range(12)]


def outcome(world: World, culprit: str) -> dict[str, Any]:
    """Return what must not depend on the order, after the pods have reported."""
    world.settle()
    world.later(11)
    (failure,) = world.status["failures"]
    told = {key: failure.get(key) for key in ("attempt", "nodeRank", "pod", "reason", "exitCode", "message", "rank")}
    counts = {key: world.status[key] for key in ("attempt", "restarts", "restartsCountedTowardsLimit", "state")}
    return told | counts | {"logs kept": culprit in world.pods}


@pytest.mark.parametrize("nodes", [2, 3, 4, 9])
@pytest.mark.parametrize("fault", FAULTS)
def test_blame_does_not_depend_on_the_order_of_the_reports(fault: str, nodes: int) -> None:
    own, peers, reason = FAULTS[fault]
    culprit = nodes - 1
    outcomes = []
    for order in orders(nodes):
        world = a_running_world(a_job(numNodes=nodes))
        name = world.pod(culprit)["metadata"]["name"]
        for node_rank in order:
            if world.status["attempt"] == 1:
                world.set_pod(node_rank, own if node_rank == culprit else peers) if name in world.pods else None
                world.settle()
        outcomes.append(outcome(world, name))
    assert all(found == outcomes[0] for found in outcomes)
    assert (outcomes[0]["nodeRank"], outcomes[0]["reason"]) == (culprit, reason)
    assert outcomes[0]["logs kept"] and outcomes[0]["attempt"] == 2


def delete(world: World) -> None:
    world.pod(1)["metadata"] |= DELETING


def lose(world: World) -> None:
    del world.pods[world.pod(1)["metadata"]["name"]]


@pytest.mark.parametrize(("happen", "reason"), [(delete, "PodDeleted"), (lose, "PodLost")])
def test_blame_for_a_pod_taken_away_does_not_depend_on_the_order(happen: Callable[[World], None], reason: str) -> None:
    for first in (True, False):
        world = a_running_world(a_job())
        if first:
            happen(world)
        else:
            world.show(0, PEER)
            happen(world)
        world.settle()
        if "mnist-0a1b2-1-0" in world.pods and world.status["attempt"] == 1:
            world.set_pod(0, PEER)
        world.settle()
        (failure,) = world.status["failures"]
        assert (failure["nodeRank"], failure["reason"]) == (1, reason)


def test_drained_pod_that_obeyed_sigterm_is_reported_as_deleted() -> None:
    world = a_running_world(a_job())
    world.set_pod(1, failed(75, at=NOW + timedelta(seconds=1), message="stopped"))
    delete(world)
    world.settle()
    assert world.status["failures"][0]["reason"] == "PodDeleted"


def test_lost_peer_waits_for_the_cause_and_deletes_nothing() -> None:
    world = a_running_world(a_job())
    world.set_pod(0, PEER)
    made = world.reconcile()
    assert made.urgent and not made.deletes and not made.creates
    assert made.requeue_after == pytest.approx(10)
    current = world.status["currentAttempt"]
    text = "attempt 1 failed: node_rank 0 (mnist-0a1b2-1-0) ended; waiting for the other nodes to find the cause"
    times = {"since": "2026-03-01T12:00:00Z", "until": "2026-03-01T12:00:10Z"}
    assert (current["phase"], current["ending"]) == ("Ending", {"message": text} | times)
    assert world.status["state"] == "Ending" and "failures" not in world.status
    assert is_idle(world.reconcile())
    world.forward(10)
    made = world.reconcile()
    assert world.status["failures"][0]["nodeRank"] == 0, "no other pod reported"
    assert [d.name for d in made.deletes] == ["mnist-0a1b2-1-1"] and world.status["attempt"] == 2


HANG = {"node": 1, "code": 76, "kind": "Hang", "rank": 3, "step": 10, "message": "rank 3 is stopped", "hint": "a fault"}


def after_the_wait(peer: Status, seconds: float) -> World:
    """Return the world after node 0 reported this, and node 1 nothing for some seconds."""
    world = a_running_world(a_job())
    world.show(0, peer)
    assert "failures" not in world.status, "the pod that failed first may still report"
    world.later(seconds)
    return world


def test_pod_that_its_peer_names_is_blamed_if_it_does_not_end_in_time() -> None:
    world = after_the_wait(failed(77, cause="peer", kind="PeerLost", message="a peer was lost", root=HANG), 10)
    (failure,) = world.status["failures"]
    assert (failure["reason"], failure["nodeRank"], failure["pod"]) == ("Hang", 1, "mnist-0a1b2-1-1")
    assert (failure["exitCode"], failure["rank"], failure["step"]) == (76, 3, 10)
    assert failure["message"] == "node_rank 1 (mnist-0a1b2-1-1), rank 3, step 10: Hang: rank 3 is stopped"
    assert failure["hint"] == "a fault"
    assert failure["counted"] and world.status["attempt"] == 2


@pytest.mark.parametrize(
    "root",
    [None, 5, {}, {"node": 1}, HANG | {"node": 0}, HANG | {"node": 7}, HANG | {"node": True}, HANG | {"code": "76"}],
)
def test_peer_whose_report_names_no_other_pod_is_reported_itself(root: object) -> None:
    world = after_the_wait(failed(77, cause="peer", kind="PeerLost", message="a peer was lost", root=root), 10)
    (failure,) = world.status["failures"]
    assert (failure["reason"], failure["nodeRank"]) == ("PeerLost", 0)


@pytest.mark.parametrize("peer", [PEER, failed(77, cause="peer", message="a peer was lost", root=HANG)])
def test_cause_that_is_reported_five_seconds_late_is_blamed_and_keeps_its_log(peer: Status) -> None:
    world = after_the_wait(peer, 5)
    assert "failures" not in world.status, "a peer was lost, so another pod failed"
    world.show(1, ended(139))
    (failure,) = world.status["failures"]
    assert (failure["reason"], failure["nodeRank"]) == ("SIGSEGV", 1)
    assert failure["pod"] in world.pods


def test_own_report_of_a_pod_precedes_what_its_peer_says_of_it() -> None:
    world = a_running_world(a_job())
    world.fail(0, 77, cause="peer", kind="PeerLost", message="a peer was lost", root=HANG)
    world.show(1, ended(137, reason="OOMKilled"))
    (failure,) = world.status["failures"]
    assert (failure["reason"], failure["nodeRank"]) == ("OOMKilled", 1)


def test_suspension_ends_the_wait_for_a_cause_without_a_restart() -> None:
    world = a_running_world(a_job())
    world.show(0, PEER)
    world.suspend(True)
    assert world.status["state"] == "Suspended" and world.status["restarts"] == 0
    assert world.status["currentAttempt"]["ending"]["verdict"] == "Suspended"


def test_failure_that_no_pod_shows_any_more_lets_the_attempt_run_on() -> None:
    world = a_running_world(a_job())
    world.show(0, PEER)
    world.show(0, running())
    world.later(10)
    assert world.status["state"] == "Running" and world.status["restarts"] == 0
    assert world.status["currentAttempt"]["phase"] == "Running"


@pytest.mark.parametrize("writes", [4, None], ids=["all created, not recorded", "recorded"])
def test_lost_pod_is_never_created_again_beside_a_peer_that_trains(writes: int | None) -> None:
    """The operator dies after it created all pods. A node is lost meanwhile, and another pod has started."""
    world = World(a_job())
    world.reconcile(crash_after=writes)
    if writes is None:
        world.settle()
        world.round = None
    world.set_pod(0, running())
    lose(world)
    world.settle()
    world.later(4)
    assert world.status["attempt"] == 2
    assert world.pod(0) and world.pod(1) and "mnist-0a1b2-1-1" not in world.pods
    assert all(
        "-2-" in c.name for made in world.plans[1:] for phase in made.creates for c in phase if "-" in c.name[12:]
    )


def test_own_unfinished_round_is_completed_even_if_a_pod_has_started() -> None:
    world = World(a_job(numNodes=4))
    world.reconcile(crash_after=4)
    world.round = 1, "begun"
    world.show(0, running())
    assert world.status["attempt"] == 1 and len(world.pods) == 4


def test_name_of_a_terminating_pod_is_not_waited_for() -> None:
    world = World(a_job())
    world.reconcile(crash_after=2)
    world.problems = (Problem(NAME_TERMINATING, names.PODS, "mnist-0a1b2-1-1", "Pod mnist-0a1b2-1-1 is being deleted"),)
    made = world.reconcile()
    assert [d.name for d in made.deletes] == ["mnist-0a1b2-1-0"], "no part of a gang stays"
    assert "mnist-0a1b2-1-1 is being deleted" in world.condition("Running")["message"]
    world.problems = ()
    world.settle()
    assert (world.status["attempt"], world.status["restarts"]) == (2, 0)
    assert world.attempts() == ["2"]


def test_refusals_are_retried_with_growing_delay_up_to_ten_minutes() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)
    delays = []
    for _ in range(14):
        world.problems = (Problem("CreateRefused", names.PODS, "x", "exceeded quota"),)
        world.reconcile()
        world.problems = ()
        wait = world.reconcile().requeue_after
        assert wait is not None
        delays.append(round(wait))
        world.forward(wait)
        assert world.reconcile(crash_after=1).creates
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600, 600]
    assert world.status["restarts"] == 0
    world.settle()
    assert "refusals" not in world.status["currentAttempt"], "all pods exist"


def test_status_after_a_deadline_shows_no_running_node_and_no_remaining_time() -> None:
    world = a_running_world(a_job(activeDeadlineSeconds=60))
    world.progress = ({"step": 3, "totalSteps": 9, "etaSeconds": 500, "samplesPerSecond": 9.0}, "mnist-0a1b2-1-0")
    world.later(61)
    status = world.status
    assert (status["state"], status["nodesReady"], status["nodes"]["running"]) == ("Failed", "0/2", 0)
    assert status["progress"]["step"] == 3 and "etaSeconds" not in status["progress"]
    assert status["currentAttempt"]["ending"]["verdict"] == "DeadlineExceeded"


def test_no_plan_asks_to_be_repeated_within_a_second() -> None:
    world = a_running_world(a_job(activeDeadlineSeconds=60, ttlSecondsAfterFinished=10))
    world.forward(59.99)
    assert world.reconcile().requeue_after == 1
    world.later(1)
    world.forward(8.5)
    assert world.reconcile().requeue_after == 1


@pytest.mark.parametrize("state", ["Suspended", "Succeeded", "Failed", "Running"])
def test_conditions_are_output_only(state: str) -> None:
    """A user or another program removes the conditions: no decision changes."""
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    match state:
        case "Suspended":
            world.job["spec"]["suspend"] = True
        case "Succeeded":
            world.run_all()
            for node_rank in (0, 1):
                world.set_pod(node_rank, ended(0))
        case "Failed":
            world.set_pod(0, failed(1))
    world.settle()
    before = world.status
    world.job["status"] = {key: value for key, value in before.items() if key != "conditions"}
    world.forward(50)
    made = world.reconcile()
    assert not made.deletes and not made.creates
    world.settle()
    written = ("conditions", "time")  # the time is written with any other change
    assert {k: v for k, v in world.status.items() if k not in written} == {
        k: v for k, v in before.items() if k not in written
    }


def test_active_seconds_add_up_over_attempts_and_suspensions() -> None:
    world = a_running_world(a_job())
    world.forward(10)
    world.fail(0)
    assert world.status["activeSeconds"] == 10
    world.run_all_and_settle()
    world.forward(20)
    world.suspend(True)
    world.forward(1000)
    world.suspend(False)
    assert world.status["activeSeconds"] == 30
    world.run_all_and_settle()
    world.forward(5)
    world.show_all(ended(0))
    assert world.status["activeSeconds"] == 35


RUNNING = {"number": 1, "phase": "Running", "startTime": "2026-03-01T12:00:00Z"}


@pytest.mark.parametrize(
    "spoiled",
    [
        {"conditions": [{"type": "Running"}]},
        {"failures": [{"reason": "x"}]},
        {"attempt": "first"},
        {"currentAttempt": RUNNING | {"startTime": "2026-03-01T12:00:00"}},
        {"checkpoint": {"path": "run-000001/step-000000020.pt", "step": 20}},
        {"succeededNodes": "all"},
        {"restarts": -3},
        {"restartsCountedTowardsLimit": -3},
        {"activeSeconds": -9},
        {"succeededNodes": [-1]},
        {"attempt": -1},
        {"currentAttempt": RUNNING | {"refusals": -4}},
        {"currentAttempt": RUNNING | {"failuresInRow": -4}},
    ],
    ids=str,
)
def test_spoiled_part_of_the_status_does_not_stop_the_job(spoiled: dict[str, Any]) -> None:
    world = a_running_world(a_job())
    world.progress = ({"step": 30, "totalSteps": 90, "checkpoint": {"step": 20, "path": "20.pt"}}, "mnist-0a1b2-1-0")
    world.job["status"] = world.status | spoiled
    world.settle()
    world.fail(1)
    world.run_all_and_settle()
    assert world.status["state"] == "Running" and world.status["attempt"] >= 2 and world.status["restarts"] >= 0


@pytest.mark.parametrize("label", [names.LABEL_ATTEMPT, names.LABEL_NODE_RANK])
def test_huge_number_in_a_label_does_not_reach_the_status(label: str) -> None:
    world = a_running_world(a_job())
    world.pod(1)["metadata"]["labels"][label] = "9" * 30
    world.settle()
    assert world.status["attempt"] == 2 and world.status["failures"][0]["reason"] == "PodLost"
    assert "9" * 30 not in str(world.status)


def test_missing_pod_is_not_created_beside_unrecorded_pods_that_run() -> None:
    world = a_running_world(a_job(numNodes=3))
    world.job["status"], world.round = {}, None
    del world.pods["mnist-0a1b2-1-2"]
    made = world.reconcile()
    assert not made.is_first, "pods exist, so the decision is recorded before anything is deleted"
    world.settle()
    assert world.attempts() == ["2"] and len(world.pods) == 3


def test_part_of_a_gang_does_not_stay_if_the_template_changes_before_all_exist() -> None:
    world = World(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.reconcile(crash_after=2)
    assert len(world.pods) == 1
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "Default"
    world.settle()
    assert not world.pods and world.condition("Stalled")["reason"] == "SpecChanged"
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "None"
    world.settle()
    assert len(world.pods) == 2 and world.status["restarts"] == 0


def test_wait_ends_if_the_clock_was_ahead_when_it_began() -> None:
    world = a_running_world(a_job())
    world.forward(3600)
    world.show(0, PEER)
    world.later(-3600)
    assert world.status["attempt"] == 2


def test_refused_delete_does_not_hide_why_a_create_was_refused() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)
    world.problems = (
        Problem("DeleteRefused", names.PODS, "old", "Pod old cannot be deleted: denied"),
        Problem("CreateRefused", names.PODS, "x", "exceeded quota"),
    )
    world.reconcile()
    assert world.status["currentAttempt"]["ending"]["verdict"] == "CreateRefused"
