"""Slots of requests: fair between jobs and namespaces, in an event loop with simulated time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.controller.reconcile import FLUSH_SECONDS, GRACE_SECONDS
from ddpjob_operator.controller.slots import Slots
from tests.controller.controllers import a_controller, serve
from tests.controller.faketime import run
from tests.worlds.memory import MemoryCluster

SLOW_SECONDS = 10.0


def now() -> float:
    return asyncio.get_running_loop().time()


class Requests:
    """Requests through slots; records how many each job has under way, and when each ended."""

    def __init__(self, total: int) -> None:
        self.slots = Slots(total)
        self.active: Counter[tuple[str, str]] = Counter()
        self.most: Counter[tuple[str, str]] = Counter()
        self.ended: dict[tuple[str, str], list[float]] = {}

    async def send(self, owner: tuple[str, str], seconds: float) -> None:
        async with self.slots.take(*owner):
            self.active[owner] += 1
            self.most[owner] = max(self.most[owner], self.active[owner])
            try:
                await asyncio.sleep(seconds)
            finally:
                self.active[owner] -= 1
        self.ended.setdefault(owner, []).append(now())

    def start(self, owner: tuple[str, str], number: int, seconds: float) -> list["asyncio.Task[None]"]:
        return [asyncio.create_task(self.send(owner, seconds)) for _ in range(number)]


def is_empty(slots: Slots) -> bool:
    return not any(len(value) for value in vars(slots).values() if hasattr(value, "__len__"))


def play(scenario: Callable[[Requests], Coroutine[Any, Any, None]], total: int = 56) -> Requests:
    requests = Requests(total)
    run(scenario(requests))
    assert is_empty(requests.slots)
    return requests


def test_job_alone_uses_half_of_the_slots() -> None:
    async def scenario(requests: Requests) -> None:
        await asyncio.gather(*requests.start(("a", "1"), 64, 1.0))

    requests = play(scenario)
    assert requests.most["a", "1"] == 28
    assert max(requests.ended["a", "1"]) == 3.0


def test_later_jobs_find_slots_however_slow_the_earlier_requests_are() -> None:
    async def scenario(requests: Requests) -> None:
        tasks = []
        for number in range(4):
            tasks += requests.start((f"slow-{number}", "1"), 64, 1000.0)
            await asyncio.sleep(1)
        tasks += requests.start(("slow-0", "2"), 2, 0.1)
        tasks += requests.start(("quick", "1"), 8, 0.1)
        await asyncio.gather(*tasks)

    requests = play(scenario)
    assert max(requests.ended["quick", "1"]) < 6.0
    assert max(requests.ended["slow-0", "2"]) > 1000.0  # its namespace has its share already


def test_busy_jobs_converge_to_equal_shares() -> None:
    async def scenario(requests: Requests) -> None:
        tasks = requests.start(("a", "1"), 300, 1.0)
        await asyncio.sleep(0.5)
        tasks += requests.start(("b", "1"), 300, 1.0)
        await asyncio.sleep(3.2)
        assert abs(requests.active["a", "1"] - requests.active["b", "1"]) <= 1
        await asyncio.gather(*tasks)

    play(scenario)


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("12"), st.floats(0.1, 3), st.floats(0, 2), st.floats(0, 6)),
        max_size=40,
    ),
)
def test_every_request_gets_a_slot_unless_it_is_cancelled(
    total: int, requests: list[tuple[str, str, float, float, float]]
) -> None:
    async def scenario(sender: Requests) -> None:
        async def one(namespace: str, job: str, seconds: float, start: float, patience: float) -> None:
            await asyncio.sleep(start)
            try:
                await asyncio.wait_for(sender.send((namespace, job), seconds), patience if patience < 3 else None)
            except TimeoutError:
                assert patience < 3
            assert sum(sender.active.values()) <= total

        await asyncio.wait_for(asyncio.gather(*(one(*request) for request in requests)), 10_000)

    play(scenario, total)


class SlowNamespace(MemoryCluster):
    """Creates in the namespace ``slow`` take ten seconds, as behind an admission webhook that hangs."""

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        if namespace == "slow" and resource is not names.EVENTS:
            await asyncio.sleep(SLOW_SECONDS)
        return await super().create(resource, namespace, body)


def test_tenant_behind_a_slow_webhook_does_not_delay_another() -> None:
    """Ten jobs of 64 nodes in one namespace hold no slot and no worker that the job of another namespace needs."""

    async def scenario() -> float:
        cluster = SlowNamespace()
        for namespace in ("slow", "quick"):
            cluster.create_namespace(namespace)
        loop = asyncio.get_running_loop()
        controller = a_controller(cluster, workers=8, concurrent_requests=56)
        serving = asyncio.create_task(serve(controller, cluster.watch))
        for number in range(10):
            submit(cluster, "slow", f"big-{number}", 64)
        await asyncio.sleep(1.0)
        submit(cluster, "quick", "small", 16)
        submitted = loop.time()
        while len(list(cluster.store.all(names.PODS, "quick"))) < 16:
            assert loop.time() < submitted + 5 * SLOW_SECONDS, "the pods of the other tenant are missing"
            await asyncio.sleep(0.01)
        waited = loop.time() - submitted
        while len(list(cluster.store.all(names.PODS, "slow"))) < 640:
            assert loop.time() < 100 * SLOW_SECONDS, "the pods behind the webhook are missing"
            await asyncio.sleep(1.0)
        serving.cancel()
        await asyncio.wait([serving])
        return waited

    assert run(scenario()) < 0.5


def test_nothing_is_created_after_the_controller_has_stopped() -> None:
    """Its process then gives the Lease back, and another replica works."""

    async def scenario() -> None:
        cluster, stop, loop = SlowNamespace(), asyncio.Event(), asyncio.get_running_loop()
        for namespace in ("slow", "quick"):
            cluster.create_namespace(namespace)
        controller = a_controller(cluster, concurrent_requests=8)
        submit(cluster, "quick", "first", 1)
        working = asyncio.create_task(controller.run(stop))
        await asyncio.sleep(1.0)
        assert cluster.server.get(names.DDPJOBS, "quick", "first")["status"], "the first status is recorded"
        submit(cluster, "slow", "big", 64)
        await controller.sweeper.sweep(None)
        await asyncio.sleep(1.0)
        assert cluster.server.get(names.DDPJOBS, "slow", "big")["status"], "it is recorded while the creates are sent"
        stop.set()
        stopped = loop.time()
        await working
        assert loop.time() - stopped <= GRACE_SECONDS + FLUSH_SECONDS
        created = len(list(cluster.store.all(names.PODS, "slow")))
        await asyncio.sleep(10 * SLOW_SECONDS)
        assert len(list(cluster.store.all(names.PODS, "slow"))) == created < 64

    run(scenario())


def submit(cluster: MemoryCluster, namespace: str, name: str, nodes: int) -> None:
    meta = {"name": name, "namespace": namespace}
    spec = {"image": "trainer:1", "numNodes": nodes}
    body = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": meta, "spec": spec}
    cluster.server.create(names.DDPJOBS, namespace, body)


def test_requests_of_one_job_that_wait_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: 4,096 deletes at once blocked the event loop for 20 s, because each request looked at all that waited."""
    slots, looks = Slots(16), 0
    may_take = Slots._may_take

    def counted(self: Slots, owner: tuple[str, str]) -> bool:
        nonlocal looks
        looks += 1
        return may_take(self, owner)

    monkeypatch.setattr(Slots, "_may_take", counted)

    async def request() -> None:
        async with slots.take("default", "uid"):
            await asyncio.sleep(0)

    async def requests() -> None:
        await asyncio.gather(*(request() for _ in range(500)))

    asyncio.run(requests())
    assert looks <= 5 * 500
