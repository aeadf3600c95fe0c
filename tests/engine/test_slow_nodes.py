"""A Kubernetes node on which a rank was slow in two attempts is avoided, if the spec asks for it."""

from typing import Any

import pytest

from tests.builders import World, a_job, a_started_world, failed, is_idle, running, unplaced

Json = dict[str, Any]
TEN_MINUTES = 601.0


def world_of(**spec: Any) -> World:
    spec = {"numNodes": 4, "nprocPerNode": 2, "scheduling": {"avoidSlowNodes": True}} | spec
    return a_started_world(a_job(**spec))


def place(world: World, *nodes: str) -> None:
    for node_rank, name in enumerate(nodes):
        world.set_pod(node_rank, running(), node=name)
    world.settle()


def train(world: World, seconds: float, rank: int | None, part: str = "backward") -> None:
    """Let rank 0 report for so long which rank is slow; None: that none is."""
    for passed in (0.0, seconds):
        world.forward(passed)
        step = int(world.now.timestamp())
        slow = {"rank": rank, "part": part, "seconds": 0.02, "stepSeconds": 0.05} if rank is not None else None
        world.report({"schema": 3, "phase": "train", "step": step, "slow": slow})


def slow_attempt(world: World, *nodes: str, rank: int | None = 5, part: str = "backward") -> None:
    """Run an attempt with a slow rank for ten minutes until a pod of node 0 fails, and start the next one."""
    place(world, *nodes)
    train(world, TEN_MINUTES, rank, part)
    world.fail(0, 1)
    world.run_next_attempt()


def avoided(world: World) -> dict[str, list[int]]:
    return {node["nodeName"]: node["attempts"] for node in world.status.get("avoidNodes") or ()}


def terms(world: World) -> Json:
    found = world.pod(0)["spec"].get("affinity", {}).get("nodeAffinity", {})
    assert isinstance(found, dict)
    return found


NODES = "a", "b", "c", "d"


def test_node_that_was_slow_in_two_attempts_is_the_last_choice_of_the_next_one() -> None:
    world = world_of()
    slow_attempt(world, *NODES)
    (found,) = world.status["slowNodes"]
    assert (found["nodeName"], found["attempt"], found["rank"], found["part"]) == ("c", 1, 5, "backward")
    assert not avoided(world) and not terms(world), "one observation says nothing"
    world.plans.clear()
    slow_attempt(world, *NODES)
    assert avoided(world) == {"c": [1, 2]}
    notes = [note.message for made in world.plans for note in made.events if note.reason == "NodeAvoided"]
    assert len(notes) == 1 and notes[0].endswith("it was slow in attempts 1, 2")
    (preferred,) = terms(world)["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["c"]}]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in terms(world)


def test_job_waits_for_no_other_node_than_a_slow_one() -> None:
    world = world_of(scheduling={"avoidSlowNodes": True, "partialGangSeconds": 0})
    slow_attempt(world, *NODES)
    place(world, *NODES)
    train(world, TEN_MINUTES, 5)
    world.fail(0, 1)
    world.settle_after_backoff()
    number = world.status["attempt"]
    world.pod(0)["status"] = unplaced()
    world.settle()
    world.later(120)
    assert world.status["attempt"] == number and avoided(world)


@pytest.mark.parametrize("part", ["data", "script", "throttled", "communication", "collection", "of a later release"])
def test_part_that_is_no_fact_of_the_node_is_no_observation(part: str) -> None:
    world = world_of()
    slow_attempt(world, *NODES, part=part)
    assert not world.status.get("slowNodes")


def test_nothing_is_recorded_unless_the_spec_asks_for_it() -> None:
    world = world_of(scheduling={})
    for _ in range(2):
        slow_attempt(world, *NODES)
    assert "slowNodes" not in world.status and not world.status.get("avoidNodes")


def test_rank_that_is_slow_on_another_node_as_well_is_no_fact_of_a_node() -> None:
    world = world_of()
    for _ in range(2):
        slow_attempt(world, *NODES)
    assert avoided(world) == {"c": [1, 2]}
    for _ in range(3):
        slow_attempt(world, "a", "b", "e", "d")
        assert not avoided(world) and not terms(world), "the observations are withdrawn, and never come back"


def test_other_ranks_on_the_same_node_confirm_it() -> None:
    world = world_of()
    slow_attempt(world, *NODES, rank=5)
    slow_attempt(world, "c", "a", "b", "d", rank=1)
    assert avoided(world) == {"c": [1, 2]}


def test_two_slow_ranks_of_one_attempt_are_one_observation_of_their_node() -> None:
    world = world_of()
    place(world, "a", "b", "c", "c")
    train(world, TEN_MINUTES, 5)
    train(world, TEN_MINUTES, 6)
    train(world, TEN_MINUTES, 5, "forward")
    world.fail(0, 1)
    world.run_next_attempt()
    assert {each["attempt"] for each in world.status["slowNodes"]} == {1} and not avoided(world)


def test_verdict_that_flaps_is_no_observation() -> None:
    world = world_of()
    place(world, *NODES)
    for _ in range(5):
        train(world, 400, 5)
        train(world, 10, None)
    assert not world.status.get("slowNodes")


def test_verdict_that_ended_in_the_attempt_counts_within_an_hour_before_the_next() -> None:
    within: dict[str, list[int]] = {"c": [1, 2]}
    for seconds, found in ((1800, within), (3700, {})):
        world = world_of()
        place(world, *NODES)
        train(world, TEN_MINUTES, 5)
        train(world, seconds, None)
        slow_attempt(world, *NODES, rank=None)
        slow_attempt(world, *NODES)
        assert [each["attempt"] for each in world.status["slowNodes"]] == [1, 2]
        assert avoided(world) == found


def test_suspension_keeps_what_was_observed() -> None:
    world = world_of()
    slow_attempt(world, *NODES)
    place(world, *NODES)
    train(world, TEN_MINUTES, 5)
    world.suspend(True)
    world.later(60)
    world.suspend(False)
    world.later(5)
    assert avoided(world) == {"c": [1, 2]} and terms(world)


def test_operator_that_starts_keeps_the_verdict_and_takes_no_time_without_reports_for_slow() -> None:
    world = world_of()
    place(world, *NODES)
    train(world, 60, 5)
    since, last = world.status["slow"]["since"], world.progress
    world.progress = None
    world.forward(1200)
    made = world.reconcile()
    assert not made.events and world.status["slow"]["since"] == since, "it has no answer yet"
    assert world.condition("Running")["reason"] == "TrainingSlow"
    world.progress = last
    world.settle()
    assert world.status["slow"]["since"] == since
    world.progress = None
    world.reconcile()
    train(world, 0, None)
    assert "slow" not in world.status and not world.status.get("slowNodes"), "it was seen for a minute only"


def test_rank_0_that_does_not_answer_withdraws_the_verdict() -> None:
    world = world_of()
    place(world, *NODES)
    train(world, 60, 5)
    world.progress_problem = "unreachable"
    world.settle()
    assert "slow" not in world.status
    assert is_idle(world.reconcile())


def test_pod_without_a_known_node_is_no_observation() -> None:
    world = world_of()
    place(world, *NODES)
    del world.pod(2)["spec"]["nodeName"]
    train(world, TEN_MINUTES, 5)
    train(world, 0, None)
    assert not world.status.get("slowNodes")


def test_time_of_avoidance_passes() -> None:
    world = world_of()
    for _ in range(2):
        slow_attempt(world, *NODES)
    place(world, *NODES)
    train(world, 3700, None)
    world.fail(0, 1)
    world.run_next_attempt()
    assert not avoided(world) and not terms(world)


def test_preferences_of_the_template_stay_and_nodes_that_failed_are_still_forbidden() -> None:
    wish = {"weight": 7, "preference": {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}}
    name = "preferredDuringSchedulingIgnoredDuringExecution"
    world = world_of(template={"spec": {"affinity": {"nodeAffinity": {name: [wish]}}}})
    for _ in range(2):
        place(world, *NODES)
        train(world, TEN_MINUTES, 5)
        world.set_pod(3, failed(1, kind="DeviceFailed", at=world.now, message="ECC"), node="d")
        world.settle_after_backoff()
    assert {node["nodeName"] for node in world.status["avoidNodes"]} == {"c", "d"}
    assert [term.get("weight") for term in terms(world)[name]] == [7, 100] and terms(world)[name][0] == wish
    required = terms(world)["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [each["values"] for term in required for each in term["matchFields"]] == [["d"]]


def test_node_that_failed_and_was_slow_is_forbidden() -> None:
    world = world_of()
    for _ in range(2):
        place(world, *NODES)
        train(world, TEN_MINUTES, 5)
        world.set_pod(2, failed(1, kind="DeviceFailed", at=world.now, message="ECC"), node="c")
        world.settle_after_backoff()
    (entry,) = world.status["avoidNodes"]
    assert entry["reason"] == "DeviceFailed" and "attempts" not in entry


@pytest.mark.parametrize(
    "change", [{"rank": 2**60}, {"time": "9999-12-31T23:59:59Z"}, {"attempt": 2**60}, {"since": "9999-12-31T23:59:59Z"}]
)
def test_what_a_user_wrote_into_the_status_stops_no_job(change: Json) -> None:
    world = world_of()
    for _ in range(2):
        slow_attempt(world, *NODES)
    place(world, *NODES)
    train(world, TEN_MINUTES, 5)
    world.job["status"]["slowNodes"] = [each | change for each in world.status["slowNodes"]]
    world.job["status"]["slow"] |= change
    world.progress = None
    world.settle()
    world.fail(0, 1)
    world.run_next_attempt()
    assert world.status["attempt"] == 4 and world.condition("Running")["status"] == "True"
