"""A job whose pods wait for a claim: the status names the claim and quotes its newest event."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json, condition
from ddpjob_operator.cluster.base import Forbidden, Page
from ddpjob_operator.controller.controller import Controller
from ddpjob_operator.controller.unbound_claims import MAX_READERS, UnboundClaims
from tests.controller.controllers import a_controller, serve
from tests.controller.faketime import run
from tests.worlds.memory import MemoryCluster

UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNBOUND}
CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}


class Bench:
    """A cluster with a controller and one job whose pod no node fits."""

    def __init__(self, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster or MemoryCluster()
        self.controller: Controller = a_controller(self.cluster)

    async def submit(self, **spec: Any) -> None:
        body = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": "mnist"}}
        self.cluster.server.create(names.DDPJOBS, "default", body | {"spec": {"image": "i"} | spec})
        await asyncio.sleep(1)
        (pod,) = self.cluster.server.list(names.PODS, "default").items
        status = {"phase": "Pending", "conditions": [NO_NODE]}
        self.cluster.server.patch_status(names.PODS, "default", pod["metadata"]["name"], {"status": status})
        await asyncio.sleep(1)

    def tell(self, claim: Json, reason: str, message: str, time: str) -> None:
        about = {"kind": "PersistentVolumeClaim", "name": claim["metadata"]["name"], "uid": claim["metadata"]["uid"]}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": reason.lower(), "namespace": "default"}}
        body = event | {"involvedObject": about | {"namespace": "default"}, "reason": reason, "message": message}
        self.cluster.server.create(names.EVENTS, "default", body | {"type": "Warning", "lastTimestamp": time})

    def message(self) -> str:
        job = self.cluster.server.get(names.DDPJOBS, "default", "mnist")
        found = condition(job["status"], "Scheduled")
        assert found["reason"] == "Unschedulable"
        return str(found["message"])


class NoEvents(MemoryCluster):
    """Refuses to list events, as for an operator that still has the Role of an earlier release."""

    async def pages(self, resource: Resource, *args: Any, **options: Any) -> AsyncIterator[Page]:
        if resource is names.EVENTS:
            raise Forbidden("events is forbidden", code=403)
        async for page in super().pages(resource, *args, **options):
            yield page


class CountedReads(MemoryCluster):
    """Counts the reads of claims, and how many there are at a time; each takes 0.1 s."""

    reads = now = most = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        self.reads, self.now = self.reads + 1, self.now + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.1)
        self.now -= 1
        return await super().get(resource, namespace, name)


def on_bench(test: Callable[[Bench], Any], cluster: MemoryCluster | None = None) -> None:
    async def whole() -> None:
        bench = Bench(cluster)
        task = asyncio.create_task(serve(bench.controller, bench.cluster.watch))
        try:
            await test(bench)
        finally:
            task.cancel()
            await asyncio.wait({task})

    run(whole())


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found'),
        ("FailedBinding", "no persistent volumes available for this claim and no storage class is set"),
        ("WaitForFirstConsumer", "waiting for first consumer to be created before binding"),
    ],
)
def test_message_names_the_claim_and_quotes_its_newest_event(reason: str, message: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.submit(checkpoint={"claimTemplate": {"spec": CLAIM}})
        claim = bench.cluster.server.get(names.CLAIMS, "default", "mnist-checkpoints")
        bench.tell(claim, "Earlier", "of yesterday", "2026-02-28T12:00:00Z")
        bench.tell(claim, reason, message, "2026-03-01T12:00:00Z")
        await asyncio.sleep(20)
        assert f"{UNBOUND}; claim mnist-checkpoints is Pending: {reason}: {message}" in bench.message()

    on_bench(test)


def test_claim_that_does_not_exist_is_named() -> None:
    async def test(bench: Bench) -> None:
        await bench.submit(checkpoint={"claimName": "models"}, data={"claimName": "mnist"})
        await asyncio.sleep(20)
        assert bench.message().endswith("claim models does not exist; claim mnist does not exist")

    on_bench(test)


def test_claim_is_named_without_the_right_to_list_events() -> None:
    async def test(bench: Bench) -> None:
        await bench.submit(checkpoint={"claimTemplate": {"spec": CLAIM}}, data={"claimName": "absent"})
        await asyncio.sleep(20)
        assert bench.message().endswith("claim mnist-checkpoints is Pending; claim absent does not exist")

    on_bench(test, NoEvents())


def test_bound_claims_are_read_once_and_not_mentioned() -> None:
    async def test(bench: Bench) -> None:
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": CLAIM}
        bench.cluster.server.create(names.CLAIMS, "default", body)
        bench.cluster.server.patch_status(names.CLAIMS, "default", "models", {"status": {"phase": "Bound"}})
        await bench.submit(checkpoint={"claimName": "models"})
        await asyncio.sleep(20)
        assert bench.message().endswith(UNBOUND)
        (followed,) = bench.controller.claims._followed.values()
        assert followed.task.done()

    on_bench(test)


def test_claims_of_a_thousand_jobs_are_read_in_turn() -> None:
    async def test() -> None:
        cluster = CountedReads()
        claims = UnboundClaims(cluster, lambda key: None)
        for number in range(1000):
            claims.follow(Key("default", f"job-{number}"), ("absent",))
        await asyncio.sleep(60)
        assert cluster.reads >= 1000 and cluster.most == MAX_READERS
        claims.close()

    run(test())


def test_a_claim_that_waits_for_days_is_read_each_five_minutes() -> None:
    """In a full cluster a claim that waits for its first pod is Pending for as long as that. Each read lists events."""

    async def test() -> None:
        cluster = CountedReads()
        claims = UnboundClaims(cluster, lambda key: None)
        claims.follow(Key("default", "job"), ("absent",))
        await asyncio.sleep(120)
        assert cluster.reads == 4  # at 0, 15, 45 and 105 s
        await asyncio.sleep(24 * 3600)
        assert 280 <= cluster.reads <= 295
        claims.close()

    run(test())
