"""What the in-memory cluster has and an API server lacks: faults, a given clock, a dropped history, dumps."""

import asyncio
import itertools
import json
from datetime import UTC, datetime, timedelta

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Invalid,
    NamespaceTerminating,
    NotFound,
    Unavailable,
)
from tests.cluster.test_verbs import a_job, a_pod
from tests.worlds.memory import MemoryCluster, Watch
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster, lost_answer

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def owned_by(owner: Json, name: str) -> Json:
    pod = a_pod(name)
    meta = owner["metadata"]
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
    pod["metadata"]["ownerReferences"] = [reference]
    return pod


def seen(watch: Watch) -> list[tuple[str, str]]:
    return [(event["type"], event["object"]["metadata"]["name"]) for event in watch.take()]


async def test_a_returned_object_is_a_copy() -> None:
    cluster = MemoryCluster()
    body = a_job()
    created = await cluster.create(names.DDPJOBS, "default", body)
    created["spec"]["image"] = body["spec"]["image"] = "changed"
    read = await cluster.get(names.DDPJOBS, "default", "job")
    (await cluster.list(names.DDPJOBS)).items[0]["spec"]["image"] = read["spec"]["image"] = "changed"
    assert (await cluster.get(names.DDPJOBS, "default", "job"))["spec"]["image"] == "image:1"


async def test_a_body_that_is_not_json_is_refused_and_nothing_is_stored() -> None:
    cluster = MemoryCluster()
    job = a_job()
    job["spec"]["numNodes"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        await cluster.create(names.DDPJOBS, "default", job)
    assert not (await cluster.list(names.DDPJOBS)).items


async def test_objects_owned_by_a_deleted_job_are_collected_and_no_others() -> None:
    cluster = MemoryCluster()
    job = await cluster.create(names.DDPJOBS, "default", a_job())
    await cluster.create(names.PODS, "default", owned_by(job, "mine"))
    await cluster.create(names.PODS, "default", a_pod("free"))
    await cluster.delete(names.DDPJOBS, "default", "job")
    assert len((await cluster.list(names.PODS)).items) == 1
    assert (await cluster.list(names.PODS)).items[0]["metadata"]["name"] == "free"


async def test_garbage_is_collected_after_the_request_not_during_it() -> None:
    cluster = MemoryCluster()
    job = await cluster.create(names.DDPJOBS, "default", a_job())
    await cluster.create(names.PODS, "default", owned_by(job, "mine"))
    cluster.server.delete(names.DDPJOBS, "default", "job")
    assert cluster.server.get(names.PODS, "default", "mine")
    await asyncio.sleep(0)
    with pytest.raises(NotFound):
        cluster.server.get(names.PODS, "default", "mine")


async def test_without_automatic_collection_only_collect_collects() -> None:
    cluster = MemoryCluster(collects=False)
    job = await cluster.create(names.DDPJOBS, "default", a_job())
    await cluster.create(names.PODS, "default", owned_by(job, "mine"))
    await cluster.delete(names.DDPJOBS, "default", "job")
    assert len((await cluster.list(names.PODS)).items) == 1
    assert cluster.collect() == 1
    assert cluster.collect() == 0
    assert not (await cluster.list(names.PODS)).items


async def test_a_bound_pod_is_removed_when_its_kubelet_confirms_the_deletion() -> None:
    cluster = MemoryCluster(clock=lambda: NOW)
    await cluster.create(names.PODS, "default", a_pod())
    cluster.server.bind("default", "pod", "worker")
    going = await cluster.delete(names.PODS, "default", "pod")
    assert going["metadata"]["deletionTimestamp"] == "2026-03-01T12:00:30Z"
    assert going["spec"]["nodeName"] == "worker"
    with pytest.raises(Conflict, match="is being deleted"):
        cluster.server.bind("default", "pod", "other")
    await cluster.delete(names.PODS, "default", "pod", grace_seconds=0)
    with pytest.raises(NotFound):
        await cluster.get(names.PODS, "default", "pod")


async def test_times_and_uids_come_from_the_given_functions() -> None:
    moments = itertools.count()
    cluster = MemoryCluster(clock=lambda: NOW + timedelta(hours=next(moments)), new_uid=lambda: "the-uid")
    first = await cluster.create(names.PODS, "default", a_pod("a"))
    second = await cluster.create(names.PODS, "default", a_pod("b"))
    assert first["metadata"]["creationTimestamp"] == "2026-03-01T12:00:00Z"
    assert second["metadata"]["creationTimestamp"] == "2026-03-01T13:00:00Z"
    assert first["metadata"]["uid"] == "the-uid"


async def test_a_fault_before_a_write_prevents_it() -> None:
    cluster = FaultyCluster(lambda call: Fault(before=Unavailable("down")) if call.is_write else None)
    with pytest.raises(Unavailable, match="down"):
        await cluster.create(names.PODS, "default", a_pod())
    assert not (await cluster.list(names.PODS)).items


async def test_a_write_whose_response_is_lost_is_carried_out() -> None:
    cluster = FaultyCluster(lambda call: lost_answer(call.verb) if call.number == 1 else None)
    with pytest.raises(Unavailable):
        await cluster.create(names.PODS, "default", a_pod())
    with pytest.raises(AlreadyExists):
        await cluster.create(names.PODS, "default", a_pod())


async def test_a_hook_receives_every_call_in_order() -> None:
    calls: list[Call] = []
    cluster = FaultyCluster(calls.append)
    await cluster.create(names.PODS, "default", a_pod())
    await cluster.patch_status(names.PODS, "default", "pod", {"status": {"phase": "Running"}})
    await cluster.list(names.PODS)
    seen_calls = [(call.number, call.verb, call.name, call.is_write) for call in calls]
    assert seen_calls == [(1, "create", "pod", True), (2, "patch_status", "pod", True), (3, "list", "", False)]


async def test_a_watch_sends_existing_objects_and_then_changes() -> None:
    cluster = MemoryCluster()
    await cluster.create(names.PODS, "default", a_pod("a", colour="red"))
    await cluster.create(names.PODS, "default", a_pod("b", colour="blue"))
    watch = cluster.watch(names.PODS, "default", "colour=red")
    assert seen(watch) == [("ADDED", "a")]
    await cluster.patch(names.PODS, "default", "b", {"metadata": {"labels": {"colour": "red"}}})
    await cluster.patch(names.PODS, "default", "a", {"metadata": {"labels": {"colour": "blue"}}})
    await cluster.patch_status(names.PODS, "default", "b", {"status": {"phase": "Running"}})
    assert seen(watch) == [("ADDED", "b"), ("DELETED", "a"), ("MODIFIED", "b")]


async def test_a_watch_from_a_version_misses_no_change() -> None:
    cluster = MemoryCluster()
    await cluster.create(names.PODS, "default", a_pod("before"))
    listed = await cluster.list(names.PODS)
    await cluster.create(names.PODS, "default", a_pod("between"))
    watch = cluster.watch(names.PODS, resource_version=listed.resource_version)
    await cluster.create(names.PODS, "default", a_pod("after"))
    assert seen(watch) == [("ADDED", "between"), ("ADDED", "after")]


async def test_a_watch_waits_for_events_until_it_is_closed() -> None:
    cluster = MemoryCluster()
    watch = cluster.watch(names.PODS)

    async def collect() -> list[str]:
        return [event["object"]["metadata"]["name"] async for event in watch]

    reader = asyncio.create_task(collect())
    await asyncio.sleep(0)
    await cluster.create(names.PODS, "default", a_pod("a"))
    watch.close()
    assert await reader == ["a"]


async def test_a_watch_from_a_dropped_version_gets_410() -> None:
    cluster = MemoryCluster()
    await cluster.create(names.PODS, "default", a_pod("a"))
    version = (await cluster.list(names.PODS)).resource_version
    await cluster.create(names.PODS, "default", a_pod("b"))
    cluster.store.compact()
    with pytest.raises(ClusterError, match="too old resource version") as caught:
        cluster.watch(names.PODS, resource_version=version)
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


async def test_a_dump_is_json_and_can_be_loaded_into_another_cluster() -> None:
    cluster = MemoryCluster()
    cluster.create_namespace("team")
    job = await cluster.create(names.DDPJOBS, "team", a_job())
    await cluster.create(names.PODS, "team", owned_by(job, "mine"))
    again = MemoryCluster()
    again.load(json.loads(json.dumps(cluster.dump())))
    assert await again.get(names.DDPJOBS, "team", "job") == job
    patched = await again.patch(names.DDPJOBS, "team", "job", {"spec": {"suspend": True}})
    assert int(patched["metadata"]["resourceVersion"]) > int(job["metadata"]["resourceVersion"])
    await again.delete(names.DDPJOBS, "team", "job")
    assert not (await again.list(names.PODS)).items


async def test_nothing_is_created_in_a_missing_or_terminating_namespace() -> None:
    cluster = MemoryCluster()
    with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
        await cluster.create(names.PODS, "nowhere", a_pod())
    cluster.create_namespace("doomed")
    await cluster.create(names.PODS, "doomed", a_pod())
    cluster.delete_namespace("doomed")
    with pytest.raises(NamespaceTerminating):
        await cluster.create(names.PODS, "doomed", a_pod("late"))
    assert not (await cluster.list(names.PODS)).items


async def test_a_service_with_an_address_is_refused() -> None:
    body: Json = {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 1}]}}
    with pytest.raises(Invalid, match="only headless Services"):
        await MemoryCluster().create(names.SERVICES, "default", body)
