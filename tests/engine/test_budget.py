"""The budget of restarts: limits, delays, resets and refunds."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api.restarts import Backoff
from ddpjob.api.times import parse_time, timestamp
from ddpjob.engine.budget import restart_delay
from tests.builders import (
    DELETING,
    World,
    a_job,
    a_running_world,
    a_started_world,
    disrupted,
    ended,
    failed,
    is_idle,
    running,
    unplaced,
)

PEER = failed(77, cause="peer", kind="PeerLost", message="connection closed")
LOST = running(**disrupted("DeletionByTaintManager"))


def counts(world: World) -> tuple[int, int]:
    return world.status["restarts"], world.status["restartsCountedTowardsLimit"]


def test_delay_doubles_up_to_the_maximum_and_loses_at_most_a_quarter() -> None:
    backoff = Backoff(initial_seconds=2, max_seconds=10)
    for in_row, longest in ((0, 0), (1, 0), (2, 2), (3, 4), (4, 8), (5, 10), (99, 10)):
        delays = [restart_delay(backoff, in_row, f"{n}") for n in range(50)]
        assert all(0.75 * longest <= delay <= longest for delay in delays)
        assert restart_delay(backoff, in_row, "same") == restart_delay(backoff, in_row, "same")
        assert len(set(delays)) > 40 or not longest


def test_second_failure_in_a_row_waits_and_the_wait_survives_a_crash() -> None:
    world = a_running_world(a_job(restartPolicy={"backoff": {"initialSeconds": 20, "maxSeconds": 60}}))
    world.fail(0)
    assert world.status["attempt"] == 2, "the first failure restarts at once"
    world.run_all_and_settle()
    world.set_pod(0, failed(1))
    world.reconcile(crash_after=1)
    until = world.status["currentAttempt"]["ending"]["until"]
    world.settle()
    assert world.status["currentAttempt"]["ending"]["until"] == until
    assert world.status["attempt"] == 2 and world.status["state"] == "Restarting"
    assert 15 <= (world.reconcile().requeue_after or 0) <= 21
    world.later(21)
    assert world.status["attempt"] == 3 and counts(world) == (2, 2)


@pytest.mark.parametrize(
    ("given", "first", "longest"),
    [
        ({}, 10, 360),
        ({"initialSeconds": 20}, 20, 360),
        ({"initialSeconds": 600}, 600, 600),
        ({"maxSeconds": 5}, 5, 5),
        ({"initialSeconds": 1, "maxSeconds": 60}, 1, 60),
    ],
)
def test_delay_that_is_not_given_agrees_with_the_given_one(given: dict[str, int], first: int, longest: int) -> None:
    assert Backoff.model_validate(given).first_and_longest == (first, longest)


def test_restarts_that_do_not_count_are_limited_by_max_total_restarts() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0, "maxTotalRestarts": 3}))
    for _ in range(4):
        del world.pods[world.pod(1)["metadata"]["name"]]
        world.run_next_attempt()
    assert world.condition("Failed")["reason"] == "MaxTotalRestartsExceeded"
    assert counts(world) == (3, 0)
    assert [f["action"] for f in world.status["failures"]] == ["Restart"] * 3 + ["Fail"]


def drain(world: World) -> None:
    """Drain the Kubernetes node of node 1, and let the next attempt run."""
    pod = world.pod(1)
    pod["metadata"] |= DELETING
    pod["status"] = running(**disrupted("EvictionByEvictionAPI"))
    world.settle()
    world.pods.clear()
    world.run_next_attempt()


@pytest.mark.parametrize(("most", "drains", "state"), [(3, 9, "Running"), (1, 9, "Running"), (0, 1, "Failed")])
def test_planned_losses_count_towards_no_limit_but_zero(most: int, drains: int, state: str) -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0, "maxTotalRestarts": most}))
    for _ in range(drains):
        drain(world)
    assert world.status["state"] == state
    assert "restartsCountedTowardsTotal" not in world.status


def save(world: World, step: int) -> None:
    """Let rank 0 report a checkpoint."""
    report = {"step": step, "totalSteps": 10**6, "checkpoint": {"path": f"{step}.pt", "step": step}}
    world.report(report)


def fail(world: World, after: float = 20, **report: Any) -> None:
    world.forward(after)
    world.fail(1, 1, at=world.now, **report)


def test_checkpoint_that_is_later_than_all_before_sets_the_budget_back() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 2}))
    for step in (100, 200, 300):
        for _ in range(2):
            save(world, step)
            fail(world)
            world.run_next_attempt()
        assert counts(world)[1] == 2, "one after progress, and one after none"
    save(world, 300)
    fail(world)
    assert world.condition("Failed")["reason"] == "MaxRestartsExceeded"


@pytest.mark.parametrize(("seconds", "state"), [(20, "Failed"), (600, "Running")])
def test_step_per_attempt_does_not_restart_a_job_within_minutes_without_end(seconds: float, state: str) -> None:
    world = a_running_world(a_job(restartPolicy={"maxTotalRestarts": 5}))
    for step in range(1, 7):
        save(world, step)
        fail(world, after=seconds)
        if world.status["state"] == "Failed":
            break
        world.run_next_attempt()
    assert world.status["state"] == state
    if state == "Failed":
        assert (step, world.condition("Failed")["reason"]) == (6, "MaxTotalRestartsExceeded")


def test_failure_that_is_seen_together_with_progress_follows_it() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 1}))
    for _ in range(2):
        world.progress = {"step": 10, "totalSteps": 100}, world.pod(0)["metadata"]["name"]
        fail(world)
        world.run_next_attempt()
    assert world.status["state"] == "Failed" and world.status["attempt"] == 2


def test_long_attempt_of_a_program_that_reports_is_no_progress_without_a_checkpoint() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 2}))
    save(world, 100)
    for _ in range(3):
        fail(world, after=86_400)
        world.settle_after_backoff()
        if world.status["state"] != "Failed":
            world.run_all()
            save(world, 100)
    assert world.status["state"] == "Failed" and counts(world) == (2, 2)


def test_first_failure_after_progress_restarts_at_once_and_the_next_ones_after_growing_delays() -> None:
    world = a_running_world(a_job())
    save(world, 100)
    waited = []
    for _ in range(7):
        fail(world)
        ending = world.status["currentAttempt"].get("ending")
        waited.append((parse_time(ending["until"]) - world.now).total_seconds() if ending else 0.0)
        world.run_next_attempt()
    for seconds, longest in zip(waited, (0, 10, 20, 40, 80, 160, 320), strict=True):
        assert 0.75 * longest <= seconds <= longest + 1


def survive(world: World, **report: Any) -> float:
    """Return for how long the job lives after its first failure, if each attempt fails 20 s after its start."""
    began = world.now
    while True:
        fail(world, **report)
        while world.status["currentAttempt"].get("ending"):
            if world.status["state"] == "Failed":
                return (world.now - began).total_seconds() - 20
            world.later(world.reconcile().requeue_after or 1)
        world.run_all_and_settle()


def test_job_that_has_trained_survives_an_outage_of_half_an_hour_by_default() -> None:
    world = a_running_world(a_job())
    save(world, 100)
    assert survive(world, exception="EndpointConnectionError", message="no route to host") >= 1800
    assert world.condition("Failed")["reason"] == "MaxRestartsExceeded"
    # Whatever part of the delays is drawn.
    delays = [min(restart_delay(Backoff(), row, f"{n}") for n in range(99)) for row in range(1, 13)]
    assert sum(delays) + 12 * 20 >= 1800


def test_job_that_has_never_trained_fails_within_two_minutes_by_default() -> None:
    world = a_running_world(a_job())
    assert survive(world) <= 120 and world.status["attempt"] == 4


OF_SERVICES = (
    ("EndpointConnectionError", 'Could not connect to the endpoint URL: "https://s3.example.com/data/17"'),
    (
        "ClientError",
        "An error occurred (SlowDown) when calling the GetObject operation: Please reduce your request rate",
    ),
    ("gaierror", "[Errno -3] Temporary failure in name resolution"),
    ("OSError", "[Errno 116] Stale file handle: '/data/train'"),
    ("HfHubHTTPError", "503 Server Error: Service Temporarily Unavailable for url: https://huggingface.co/api/models"),
)


@pytest.mark.parametrize(("exception", "message"), OF_SERVICES)
def test_new_job_survives_an_outage_of_a_service_as_one_that_has_trained(exception: str, message: str) -> None:
    assert survive(a_running_world(a_job()), exception=exception, kind=exception, message=message) >= 1800


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/train'"),
        ("ConfigAttributeError", "Key 'lr' is not in struct"),
    ],
)
def test_new_job_with_a_wrong_path_or_setting_fails_within_two_minutes(exception: str, message: str) -> None:
    assert survive(a_running_world(a_job()), exception=exception, kind=exception, message=message) <= 120


def test_job_of_this_machine_fails_within_two_minutes_after_its_last_progress() -> None:
    """A person is near, and no other node may help."""
    world = a_running_world(a_job())
    save(world, 100)
    world.settings = replace(world.settings, is_local=True)
    assert survive(world, exception="OSError", message="[Errno 28] No space left on device") <= 120


@pytest.mark.parametrize("limit", [1, 20])
def test_limit_that_the_user_gives_holds_before_and_after_the_first_step(limit: int) -> None:
    for trained in (False, True):
        world = a_running_world(a_job(restartPolicy={"maxRestarts": limit}))
        if trained:
            save(world, 100)
        survive(world)
        assert counts(world) == (limit, limit)


def out_of_memory(world: World, after: float) -> None:
    """Let the attempt run for so long, and then exceed its memory limit."""
    world.run_all_and_settle()
    world.forward(after)
    world.set_pod(1, ended(137, reason="OOMKilled"))
    world.settle_after_backoff()


@pytest.mark.parametrize(
    ("seconds", "total", "state"), [(600, 100, "Running"), (599, 100, "Failed"), (600, 20, "Failed")]
)
def test_program_that_reports_nothing_and_runs_for_ten_minutes_uses_no_restart_up(
    seconds: float, total: int, state: str
) -> None:
    """Also of a job that crashed a dozen times in an hour, the total number of restarts is limited."""
    world = a_running_world(a_job(restartPolicy={"maxTotalRestarts": total}))
    while world.status["state"] != "Failed" and world.status["attempt"] < 22:
        fail(world, after=seconds)
        world.run_next_attempt()
    assert world.status["state"] == state


@pytest.mark.parametrize(("between", "state"), [(3600, "Restarting"), (3599, "Failed")])
def test_out_of_memory_restarts_once_between_two_resets(between: float, state: str) -> None:
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 9}))
    out_of_memory(world, 60)
    out_of_memory(world, between)
    assert world.status["state"] == state


def lose_node_after_restart(world: World, seconds: float) -> None:
    """Fail node 0 with a lost peer; after the restart the old pod of node 1 proves to be on a lost node."""
    world.show(0, PEER)
    silent = world.pod(1)
    world.later(11)
    assert world.status["failures"][-1]["provisional"] and counts(world) == (1, 1)
    world.pods["old"] = silent | {"metadata": silent["metadata"] | DELETING}
    world.settle()
    world.forward(seconds)
    world.pods["old"]["status"] = LOST


def test_restart_is_refunded_once_when_the_node_proves_lost_and_names_the_lost_pod() -> None:
    world = a_running_world(a_job())
    lose_node_after_restart(world, 100)
    lost = world.pods["old"]
    lost["spec"]["nodeName"] = "worker-that-stopped"
    notes = [note.reason for note in world.reconcile().events]
    world.settle()
    last = world.status["failures"][-1]
    assert (last["reason"], last["counted"], last.get("provisional")) == ("NodeLost", False, None)
    assert counts(world) == (1, 0) and notes.count("RestartRefunded") == 1
    assert (last["nodeRank"], last["pod"]) == (1, lost["metadata"]["name"])
    assert last["nodeName"] == "worker-that-stopped"
    assert last["next"] == "ask an administrator to run kubectl describe node worker-that-stopped"
    assert not {"exitCode", "signal", "rank", "exception", "logTail"} & last.keys(), "these are of the peer"


def test_restart_is_not_refunded_after_two_minutes() -> None:
    world = a_running_world(a_job())
    lose_node_after_restart(world, 130)
    world.settle()
    assert counts(world) == (1, 1)


def lose_peer(world: World, node_rank: int) -> None:
    """Fail the current attempt with a lost peer, whose pod runs on the lost node ``bad-<node_rank>``."""
    for rank in (0, 1):
        world.set_pod(rank, running(), node=f"bad-{rank}" if rank == node_rank else "worker")
    world.settle()
    attempt = world.status["attempt"]
    lost = world.pod(node_rank)
    world.show(1 - node_rank, PEER)
    world.later(11)
    world.later(10)
    assert world.status["attempt"] == attempt + 1
    world.pods[f"old-{attempt}"] = lost | {"metadata": lost["metadata"] | DELETING, "status": running()}


def notice_loss(world: World, *attempts: int) -> None:
    for attempt in attempts:
        world.pods[f"old-{attempt}"]["status"] = LOST


@pytest.mark.parametrize("together", [True, False])
def test_each_of_two_failures_is_refunded_when_its_node_proves_lost(together: bool) -> None:
    world = a_started_world(a_job())
    lose_peer(world, 1)
    lose_peer(world, 0)
    assert counts(world) == (2, 2)
    world.forward(50)
    notice_loss(world, *([1, 2] if together else [1]))
    notes = [note.reason for note in world.reconcile().events]
    if not together:
        assert counts(world) == (2, 1)
        notice_loss(world, 2)
        notes += [note.reason for note in world.reconcile().events]
    assert counts(world) == (2, 0) and notes.count("RestartRefunded") == 2
    first, second = world.status["failures"]
    assert (first["reason"], first["nodeName"], first["nodeRank"]) == ("NodeLost", "bad-1", 1)
    assert (second["reason"], second["nodeName"], second["nodeRank"]) == ("NodeLost", "bad-0", 0)
    assert is_idle(world.reconcile())


def test_failure_before_a_reset_of_the_budget_is_not_refunded() -> None:
    world = a_started_world(a_job())
    lose_peer(world, 1)
    world.run_all_and_settle()
    save(world, 100)
    world.forward(30)
    world.fail(0)
    assert counts(world) == (2, 1), "the counter began again before this failure"
    notice_loss(world, 1)
    world.settle()
    assert counts(world) == (2, 1)


def test_job_without_restarts_waits_whether_the_node_proves_lost() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.show(0, PEER)
    world.later(11)
    assert world.status["state"] == "Ending" and "failures" not in world.status
    assert world.reconcile().requeue_after == pytest.approx(109)
    world.forward(60)
    world.pod(1)["status"] = LOST
    world.pod(1)["metadata"] |= DELETING
    world.settle()
    assert world.status["failures"][0]["reason"] == "NodeLost"
    assert world.status["attempt"] == 2 and counts(world) == (1, 0)


@pytest.mark.parametrize(
    ("waits", "is_local"),
    [((11,), True), ((11, 110), False), ((11, -3600), False)],
    ids=["no Kubernetes node of one machine", "none is lost within two minutes", "the clock was set back"],
)
def test_job_without_restarts_fails_if_no_node_can_prove_lost(waits: tuple[float, ...], is_local: bool) -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.settings = replace(world.settings, is_local=is_local)
    world.show(0, PEER)
    for seconds in waits:
        assert world.status["state"] == "Ending"
        world.later(seconds)
    assert world.status["state"] == "Failed" and world.condition("Failed")["reason"] == "PeerLost"


def suspect(world: World, node: str = "bad") -> None:
    world.run_all_and_settle()
    world.set_pod(1, ended(139), node=node)
    world.settle_after_backoff()
    if world.status["currentAttempt"]["phase"] == "Ending":  # the settle time came before the delay
        world.settle_after_backoff()


def node_terms(world: World) -> list[dict[str, Any]]:
    affinity = world.pod(0)["spec"].get("affinity") or {}
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


AVOIDS = [{"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}]


def test_node_with_two_crashes_is_avoided_for_an_hour() -> None:
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 9}))
    suspect(world)
    assert not node_terms(world) and "avoidNodes" not in world.status
    suspect(world)
    (entry,) = world.status["avoidNodes"]
    assert (entry["nodeName"], entry["reason"]) == ("bad", "SIGSEGV")
    assert node_terms(world) == [{"matchFields": AVOIDS}]
    assert [n.reason for made in world.plans for n in made.events].count("NodeAvoided") == 1
    world.forward(3601)
    suspect(world, node="other")
    assert world.status["avoidNodes"] == [] and not node_terms(world)


def test_every_alternative_of_the_users_affinity_gets_the_requirement() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": [{"key": "x"}]}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
        "podAffinity": {"kept": True},
    }
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 9}, template={"spec": {"affinity": affinity}}))
    suspect(world)
    suspect(world)
    assert node_terms(world) == [terms[0] | {"matchFields": AVOIDS}, {"matchFields": [{"key": "x"}, *AVOIDS]}]
    assert world.pod(0)["spec"]["affinity"]["podAffinity"] == {"kept": True}


def test_avoided_node_stays_avoided_while_the_jobs_own_old_pods_hold_the_gpus() -> None:
    """Ranks that hang in NCCL do not obey SIGTERM: the pods of the last attempt end after their grace period."""
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 9}))
    suspect(world)
    world.lingering = True
    suspect(world)
    attempt = world.status["attempt"]
    old = [pod for pod in world.pods.values() if "deletionTimestamp" in pod["metadata"]]
    assert old and node_terms(world)
    old[0]["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=120))  # raised by a webhook
    for rank in (0, 1):
        world.pod(rank)["status"] = unplaced()
    for _ in range(4):
        world.settle()
        world.forward(29)
    world.settle()
    assert world.status["attempt"] == attempt and world.status["avoidNodes"], "the GPUs are not free yet"
    del world.pods[old[0]["metadata"]["name"]]
    world.settle()
    world.later(29)
    assert world.status["attempt"] == attempt, "the scheduler may place them now"
    world.later(2)
    assert world.status["attempt"] == attempt + 1 and world.status["avoidNodes"] == []


def test_node_avoided_by_waiting_pods_is_used_again_even_if_its_time_passed_meanwhile() -> None:
    world = a_started_world(a_job(restartPolicy={"maxRestarts": 9}))
    suspect(world)
    suspect(world)
    attempt = world.status["attempt"]
    world.job["status"]["avoidNodes"][0]["until"] = timestamp(world.now + timedelta(seconds=10))
    for rank in (0, 1):
        world.pod(rank)["status"] = unplaced()
    world.settle()
    world.later(31)
    assert world.status["attempt"] == attempt + 1 and not node_terms(world)


def test_node_is_not_avoided_for_longer_than_an_hour_by_a_wrong_clock() -> None:
    world = a_running_world(a_job())
    entry = {"nodeName": "bad", "reason": "Hang", "until": timestamp(world.now + timedelta(days=365))}
    world.job["status"]["avoidNodes"] = [entry]
    world.fail(0)
    assert world.status["avoidNodes"] == [] and not node_terms(world)


@pytest.mark.parametrize(("action", "state"), [("RestartIgnoreLimit", "Pending"), ("Fail", "Failed")])
def test_rule_that_needs_no_budget_does_not_wait_for_a_lost_node(action: str, state: str) -> None:
    rules = [{"onReasons": ["SIGKILL"], "action": action}]
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0, "rules": rules}))
    world.show(1, ended(137))
    world.later(11)
    assert world.status["state"] in (state, "Restarting") and "failures" in world.status
