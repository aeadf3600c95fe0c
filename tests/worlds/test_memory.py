"""What the in-memory cluster has beside the behaviour of an API server, and the rules of the CRD that it enforces."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.api.spec import IMMUTABLE
from ddpjob_operator.cluster.base import AlreadyExists, ClusterError, Invalid, NotFound, Unavailable
from tests.api.specs import BAD, ILLEGAL_EDITS, OK, Edit
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster, lost_answer


def a_pod(name: str = "pod", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name} | meta, "spec": {"containers": [{"name": "main", "image": "image:1"}]}}


def a_job(spec: dict[str, Any] | None = None, name: str = "job") -> dict[str, Any]:
    identity = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}}
    return identity | {"spec": {key: value for key, value in (spec or OK).items() if value is not None}}


async def test_a_returned_object_is_a_copy_and_only_json_is_stored() -> None:
    cluster = MemoryCluster()
    body = a_job()
    created = await cluster.create(names.DDPJOBS, "default", body)
    created["spec"]["image"] = body["spec"]["image"] = "changed"
    cluster.server.list(names.DDPJOBS).items[0]["spec"]["image"] = "changed"
    assert (await cluster.get(names.DDPJOBS, "default", "job"))["spec"]["image"] == OK["image"]
    with pytest.raises(ValueError, match="JSON"):
        await cluster.create(names.DDPJOBS, "default", a_job(OK | {"numNodes": float("nan")}, "other"))


async def test_garbage_is_collected_after_the_request_not_during_it() -> None:
    cluster = MemoryCluster()
    job = await cluster.create(names.DDPJOBS, "default", a_job())
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "job", "uid": job["metadata"]["uid"]}
    await cluster.create(names.PODS, "default", a_pod("mine", ownerReferences=[owner]))
    cluster.server.delete(names.DDPJOBS, "default", "job")
    assert cluster.server.get(names.PODS, "default", "mine")
    await asyncio.sleep(0)
    with pytest.raises(NotFound):
        cluster.server.get(names.PODS, "default", "mine")


async def test_a_fault_prevents_a_write_or_only_loses_its_response() -> None:
    calls: list[Call] = []
    faults = {1: Fault(before=Unavailable("down")), 2: lost_answer("create")}
    cluster = FaultyCluster(lambda call: calls.append(call) or faults.get(call.number))  # type: ignore[func-returns-value]
    for error in (Unavailable, Unavailable, AlreadyExists):
        with pytest.raises(error):
            await cluster.create(names.PODS, "default", a_pod())
    await cluster.patch_status(names.PODS, "default", "pod", {"status": {"phase": "Running"}})
    assert [len(page.items) async for page in cluster.pages(names.PODS)] == [1]
    seen = [(call.number, call.verb, call.name, call.is_write) for call in calls[2:]]
    assert seen == [(3, "create", "pod", True), (4, "patch_status", "pod", True), (5, "list", "", False)]


async def test_a_watch_from_a_dropped_version_gets_410() -> None:
    cluster = MemoryCluster()
    version = cluster.store.version
    await cluster.create(names.PODS, "default", a_pod())
    assert len(cluster.watch(names.PODS, resource_version=str(version)).take()) == 1
    cluster.store.compact()
    with pytest.raises(ClusterError, match="too old resource version") as caught:
        cluster.watch(names.PODS, resource_version=str(version))
    assert caught.value.code == 410


async def test_a_patch_is_ambiguous_if_its_version_stood_for_another_state_before_a_restore() -> None:
    cluster = MemoryCluster()
    job = await cluster.create(names.DDPJOBS, "default", a_job())
    cluster.store.renumber()

    async def patch(version: str, suspend: bool) -> str:
        body = {"metadata": {"resourceVersion": version}, "spec": {"suspend": suspend}}
        changed = await cluster.patch(names.DDPJOBS, "default", "job", body)
        return str(changed["metadata"]["resourceVersion"])

    lowest = (await cluster.get(names.DDPJOBS, "default", "job"))["metadata"]["resourceVersion"]
    assert int(lowest) < int(job["metadata"]["resourceVersion"])
    version = await patch(lowest, suspend=True)
    cluster.store.renumber()
    assert cluster.server.ambiguous_patches == 0
    await patch(lowest, suspend=False)  # the only object has the lowest version again, and another state
    assert cluster.server.ambiguous_patches == 1 and version != lowest


def edited(edit: Edit) -> None:
    server = MemoryCluster().server
    server.create(names.DDPJOBS, "default", a_job(OK | edit.before))
    before = {key: None for key in edit.before if key not in edit.after}
    server.patch(names.DDPJOBS, "default", "job", {"spec": before | edit.after})


def test_every_cel_rule_of_the_crd_is_enforced_in_python() -> None:
    """Rules are written twice. One without its check in Python would hold in a cluster but not in local mode."""
    refusals = []
    for bad in BAD:
        with pytest.raises(Invalid) as caught:
            MemoryCluster().server.create(names.DDPJOBS, "default", a_job(bad.spec, bad.name))
        refusals.append(str(caught.value))
    for edit in ILLEGAL_EDITS:
        with pytest.raises(Invalid) as caught:
            edited(edit)
        refusals.append(str(caught.value))
    messages = set(cel_messages(openapi()))
    assert len(messages) > len(IMMUTABLE)
    assert [message for message in messages if not any(message in refusal for refusal in refusals)] == []


def cel_messages(schema: dict[str, Any]) -> Iterator[str]:
    """The messages of all CEL rules in a schema."""
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if isinstance(child, dict):
            yield from cel_messages(child)
