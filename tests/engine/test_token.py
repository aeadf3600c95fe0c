"""The token of an attempt: one for all its pods, known to no one who may not read them."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.pod_view import pod_view
from ddpjob.engine.desired import DesiredPods
from tests.builders import World, a_job, a_running_world, failed

ANOTHER = "f" * 64


def token_of(pod: dict[str, Any]) -> str | None:
    env = pod["spec"]["containers"][0]["env"]
    return next((variable["value"] for variable in env if variable["name"] == names.ENV_TOKEN), None)


def tokens(world: World) -> set[str | None]:
    return {token_of(pod) for pod in world.pods.values()}


def give(world: World, rank: int, token: str | None) -> None:
    """Replace the token of a pod, or remove it."""
    pod = world.pod(rank)
    trainer, *others = pod["spec"]["containers"]
    env = [variable for variable in trainer["env"] if variable["name"] != names.ENV_TOKEN]
    env += [{"name": names.ENV_TOKEN, "value": token}] if token else []
    pod["spec"] = pod["spec"] | {"containers": [trainer | {"env": env}, *others]}


def test_pods_of_an_attempt_share_a_token_and_the_next_attempt_has_another() -> None:
    world = a_running_world(a_job(podRetention="None"))
    (first,) = tokens(world)
    assert first is not None and len(first) == 64
    world.set_pod(1, failed(1))
    world.settle_after_backoff()
    (second,) = tokens(world)
    assert world.attempts() == ["2"] and second not in (None, first)


def test_jobs_and_operators_draw_different_tokens() -> None:
    worlds = [World(a_job()) for _ in range(3)]
    worlds[1].job["metadata"]["uid"] = "another"
    worlds[2].token_key = b"of another operator"
    for world in worlds:
        world.settle()
    assert len({token for world in worlds for token in tokens(world)}) == 3


def test_status_has_the_digest_of_the_token_and_nothing_else_has_it() -> None:
    world = a_running_world(a_job())
    (token,) = tokens(world)
    assert token is not None
    assert world.status["currentAttempt"]["tokenHash"] == digest(token)
    world.fail(1)
    texts = [world.job, [str(note) for made in world.plans for note in made.events], world.service]
    assert token not in json.dumps(texts)
    assert token not in repr(list(map(pod_view, world.pods.values())))
    creates = [phase for made in world.plans for phase in made.creates]
    assert token not in repr([replace(pods, first={}) if isinstance(pods, DesiredPods) else pods for pods in creates])


def test_pods_created_after_a_crash_of_the_operator_get_the_token_of_the_others() -> None:
    world = World(a_job(numNodes=4))
    world.reconcile(crash_after=3)  # the status and two pods
    known = tokens(world)
    world.token_key = b"of the next process"
    world.settle()
    assert len(world.pods) == 4 and tokens(world) == known and world.status["attempt"] == 1


def digest(token: str | None) -> str:
    return hashlib.sha256((token or "").encode()).hexdigest()


def test_attempt_without_pods_gets_the_token_of_the_process_that_creates_them() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)  # the status alone
    before = world.status["currentAttempt"]["tokenHash"]
    world.token_key = b"of the next process"
    made = world.reconcile()
    assert not world.pods and made.requeue_after == 5, "the process that began it may still run"
    world.forward(5)
    world.reconcile(crash_after=1)
    recorded = world.status["currentAttempt"]["tokenHash"]
    assert recorded != before and not world.pods  # before a pod exists that has it
    world.settle()
    (token,) = tokens(world)
    assert world.attempts() == ["1"] and digest(token) == recorded


def test_second_operator_that_runs_beside_the_first_creates_no_pods_of_its_own() -> None:
    world = World(a_job(numNodes=4))
    first, second = world.token_key, b"of a second process"
    world.reconcile(crash_after=1)
    for key, made in ((second, 0), (first, 1), (second, 3), (first, 4)):
        world.token_key = key
        world.reconcile(crash_after=made and 1 + (made > 1))
        assert len(tokens(world)) < 2
    world.token_key = second
    world.settle()
    assert world.attempts() == ["1"] and len(world.pods) == 4 and len(tokens(world)) == 1


def test_attempt_whose_pods_have_another_token_than_recorded_is_abandoned() -> None:
    """Creates of a process that was taken to have ended have arrived late."""
    world = World(a_job(numNodes=3))
    world.reconcile(crash_after=3)
    for rank in (0, 1):
        give(world, rank, ANOTHER)
    world.settle()
    assert world.attempts() == ["2"] and len(tokens(world)) == 1
    assert not world.status.get("restarts") and not world.status.get("failures")


@pytest.mark.parametrize("missing", [True, False], ids=["a-pod-is-missing", "all-exist"])
@pytest.mark.parametrize("token", [ANOTHER, None], ids=["another", "none"])
def test_attempt_with_two_tokens_is_abandoned(token: str | None, missing: bool) -> None:
    """Two operators have created pods of it, one perhaps of a release that draws no tokens."""
    world = World(a_job(numNodes=3))
    world.reconcile(crash_after=3 if missing else 5)
    give(world, 1, token)
    world.settle()
    assert world.status["attempt"] == 2 and len(tokens(world)) == 1
    assert not world.status.get("restarts")


def test_pods_of_a_first_attempt_with_two_tokens_are_not_adopted() -> None:
    world = World(a_job(numNodes=3))
    world.reconcile(crash_after=3)
    give(world, 1, ANOTHER)
    world.job["status"] = {}
    world.settle()
    assert world.status["attempt"] == 2 and world.attempts() == ["2"] and len(tokens(world)) == 1


def test_webhook_that_removes_the_token_from_all_pods_stops_no_attempt() -> None:
    world = World(a_job(numNodes=3))
    world.reconcile(crash_after=2)
    give(world, 0, None)
    world.round = 1, "begun"
    made = world.reconcile()
    assert world.status["attempt"] == 1 and made.creates
    for rank in (1, 2):
        give(world, rank, None)
    world.settle()
    assert world.status["attempt"] == 1 and tokens(world) == {None}


def test_no_token_is_drawn_without_a_key() -> None:
    world = World(a_job())
    world.token_key = b""
    world.settle()
    assert tokens(world) == {None} and "tokenHash" not in world.status["currentAttempt"]


def test_a_program_cannot_choose_the_token() -> None:
    world = World(
        a_job(
            template={"spec": {"containers": [{"name": "trainer", "env": [{"name": names.ENV_TOKEN, "value": "x"}]}]}}
        )
    )
    world.settle()
    assert len(tokens(world)) == 1 and "x" not in tokens(world)
