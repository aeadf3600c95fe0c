"""A job whose pods wait for a claim: the status names the claim and quotes its newest event."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json, condition
from ddpjob_operator.cluster.base import Forbidden
from ddpjob_operator.controller.unbound_claims import MAX_READERS, UnboundClaims
from tests.controller.bench import Bench, on_bench
from tests.controller.faketime import run
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNBOUND}
CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}


async def message(bench: Bench, event: Json | None = None, **spec: Any) -> str:
    """Submit a job whose pod no node fits, and return what its status says after 20 s. event: of its claim."""
    bench.submit(numNodes=1, **spec)
    await asyncio.sleep(1)
    for each in ([event | {"metadata": {"name": "new"}}] if event else []) + [EARLIER]:
        claim = bench.server.get(names.CLAIMS, "default", "mnist-checkpoints")["metadata"] if event else {"uid": ""}
        about = {"kind": names.CLAIMS.kind, "namespace": "default", "name": "mnist-checkpoints", "uid": claim["uid"]}
        body = {"apiVersion": "v1", "kind": "Event", "involvedObject": about, "type": "Warning"} | each
        bench.server.create(names.EVENTS, "default", body)
    (pod,) = bench.pods(1)
    bench.report(pod, {"phase": "Pending", "conditions": [NO_NODE]})
    await asyncio.sleep(20)
    found = condition(bench.status(), "Scheduled")
    assert found["reason"] == "Unschedulable"
    return str(found["message"])


EARLIER: Json = {"metadata": {"name": "earlier"}, "reason": "Earlier", "message": "of yesterday"}
EARLIER |= {"lastTimestamp": "2026-02-28T12:00:00Z"}


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found'),
        ("WaitForFirstConsumer", "waiting for first consumer to be created before binding"),
    ],
)
@on_bench
async def test_message_names_the_claim_and_quotes_its_newest_event(bench: Bench, reason: str, text: str) -> None:
    event = {"reason": reason, "message": text, "lastTimestamp": "2026-03-01T12:00:00Z"}
    found = await message(bench, event, checkpoint={"claimTemplate": {"spec": CLAIM}})
    assert f"{UNBOUND}; claim mnist-checkpoints is Pending: {reason}: {text}" in found


@on_bench
async def test_claims_are_named_without_the_right_to_list_events(bench: Bench) -> None:
    forbidden = Fault(before=Forbidden("events is forbidden", code=403))
    bench.rule = lambda call: forbidden if (call.verb, call.resource) == ("list", names.EVENTS) else None
    found = await message(bench, checkpoint={"claimTemplate": {"spec": CLAIM}}, data={"claimName": "absent"})
    assert found.endswith("claim mnist-checkpoints is Pending; claim absent does not exist")


@on_bench
async def test_bound_claims_are_read_once_and_not_mentioned(bench: Bench) -> None:
    body = {"apiVersion": "v1", "kind": names.CLAIMS.kind, "metadata": {"name": "models"}, "spec": CLAIM}
    bench.server.create(names.CLAIMS, "default", body)
    bench.server.patch_status(names.CLAIMS, "default", "models", {"status": {"phase": "Bound"}})
    assert (await message(bench, checkpoint={"claimName": "models"})).endswith(UNBOUND)
    assert bench.sent("get", names.CLAIMS) == 1


def reading(test: Callable[[UnboundClaims, list[Call]], Awaitable[None]]) -> None:
    async def whole() -> None:
        calls: list[Call] = []

        def slow(call: Call) -> Fault:
            calls.append(call)
            return Fault(slow_seconds=0.1)

        await test(UnboundClaims(FaultyCluster(slow), lambda key: None), calls)

    run(whole())


def test_claims_of_a_thousand_jobs_are_read_in_turn() -> None:
    async def test(claims: UnboundClaims, calls: list[Call]) -> None:
        for number in range(1000):
            claims.follow(Key("default", f"job-{number}"), ("absent",))
        await asyncio.sleep(9.95)
        assert len(calls) == 100 * MAX_READERS

    reading(test)


def test_a_claim_that_waits_for_days_is_read_each_five_minutes() -> None:
    """In a full cluster a claim that waits for its first pod is Pending for as long as that. Each read lists events."""

    async def test(claims: UnboundClaims, calls: list[Call]) -> None:
        claims.follow(Key("default", "job"), ("absent",))
        await asyncio.sleep(120)
        assert len(calls) == 4  # at 0, 15, 45 and 105 s
        await asyncio.sleep(24 * 3600)
        assert 280 <= len(calls) <= 295

    reading(test)
