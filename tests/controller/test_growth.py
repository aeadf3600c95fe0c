"""The controller keeps nothing of a job that was deleted."""

import asyncio
import random
from collections.abc import Iterator, Sized
from contextlib import suppress
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Forbidden, NotFound, TooManyRequests, Unavailable
from ddpjob_operator.controller import cache as cache_module
from ddpjob_operator.controller.cache import Cache
from tests.builders import ended, running
from tests.controller.controllers import a_controller, serve
from tests.controller.faketime import run
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster, lost_answer

JOBS = 200
NAMESPACES = 20
CHANCE = random.Random(7)


def trouble(call: Call) -> Fault | None:
    """Refuse, throttle or lose one request of ten, so that every list of failures and timers is used."""
    if call.resource is names.EVENTS or CHANCE.random() > 0.1:
        return None
    faults = [
        Fault(before=Unavailable("connection refused")),
        Fault(before=TooManyRequests("busy", retry_after=1.0, code=429)),
        lost_answer(call.verb),
    ]
    if call.verb == "create":
        faults.append(Fault(before=Forbidden("exceeded quota", code=403)))
    return CHANCE.choice(faults)


async def kubelet(cluster: FaultyCluster) -> None:
    """Run every pod, and end it: one of five fails."""

    async def live(meta: Json) -> None:
        exit_code = int(CHANCE.random() < 0.2)
        for status in (running(podIP=None), ended(exit_code)):
            await asyncio.sleep(CHANCE.uniform(0, 2))
            pod = cluster.store.get(names.PODS, meta["namespace"], meta["name"])
            if pod is None or pod["metadata"]["uid"] != meta["uid"]:
                return
            cluster.server.patch_status(names.PODS, meta["namespace"], meta["name"], {"status": status})

    async with asyncio.TaskGroup() as group:
        async for event in cluster.watch(names.PODS):
            if event["type"] == "ADDED":
                group.create_task(live(event["object"]["metadata"]))
            elif "deletionTimestamp" in (meta := event["object"]["metadata"]) and event["type"] == "MODIFIED":
                with suppress(NotFound):
                    cluster.server.delete(names.PODS, meta["namespace"], meta["name"], grace_seconds=0)


async def live_through(cluster: FaultyCluster, number: int) -> None:
    """Create a job and delete it, mostly after its end."""
    key = (f"ns-{number % NAMESPACES}", f"job-{number}")
    meta = {"name": key[1], "namespace": key[0]}
    spec = {"image": "trainer:1", "numNodes": 1 + number % 2, "restartPolicy": {"maxRestarts": 2}}
    await asyncio.sleep(number * 0.1)
    cluster.server.create(
        names.DDPJOBS, key[0], {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": meta, "spec": spec}
    )
    patience = asyncio.get_running_loop().time() + CHANCE.choice([1.0, 5.0, 2000.0])
    while asyncio.get_running_loop().time() < patience:
        status = cluster.server.get(names.DDPJOBS, *key).get("status") or {}
        if status.get("state") in ("Succeeded", "Failed"):
            break
        await asyncio.sleep(1.0)
    cluster.server.delete(names.DDPJOBS, *key)


def contents(obj: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the path and length of every container that the controller's objects refer to."""
    if id(obj) in seen or isinstance(obj, str | bytes):
        return
    seen.add(id(obj))
    if isinstance(obj, dict):
        values = list(obj.items())
        if all(isinstance(value, dict) for value in obj.values()) and path.endswith("_objects"):
            for key, value in values:  # one dict per kind
                yield from contents(value, f"{path}[{key.kind}]", seen)
            return
    if isinstance(obj, Sized):
        yield path, len(obj)
    elif type(obj).__module__.startswith("ddpjob_operator.controller"):
        for name, value in vars(obj).items():
            yield from contents(value, f"{path}.{name}", seen)


def test_nothing_is_kept_of_deleted_jobs() -> None:
    async def scenario() -> dict[str, int]:
        cluster = FaultyCluster(trouble)
        for number in range(NAMESPACES):
            cluster.create_namespace(f"ns-{number}")
        controller = a_controller(cluster, workers=8, concurrent_requests=16)
        tasks = [asyncio.create_task(kubelet(cluster)), asyncio.create_task(serve(controller, cluster.watch))]
        await asyncio.gather(*(live_through(cluster, number) for number in range(JOBS)))
        for task in tasks:
            assert not task.done(), task.exception()
        kept: dict[str, int] = {}
        for _ in range(30):  # a sweep that fails is repeated a minute later
            await asyncio.sleep(120.0)
            kept = dict(contents(controller, "controller", set()))
            if not any(size for path, size in kept.items() if path not in ALLOWED):
                break
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return kept

    kept = run(scenario())
    assert len(kept) > 15, "the walk did not find the controller's containers"
    assert kept.pop("controller.cache._tombstones") > JOBS
    left = {path: size for path, size in kept.items() if size and path not in ALLOWED}
    assert not left, left


SCOPED = ("scopes", "_filled", "_wanted")
"""Of the sweeper: one entry for each served scope."""
ALLOWED = {f"controller.sweeper.{name}" for name in SCOPED} | {
    "controller.cache._tombstones",
    "controller.cache._newest",
}


def test_number_of_remembered_deletions_is_bounded() -> None:
    cache = Cache()
    for number in range(cache_module.MAX_TOMBSTONES + 500):
        cache.remove(names.PODS, "default", "a", f"uid-{number}")
    kept = dict(contents(cache, "cache", set()))
    assert kept["cache._tombstones"] == cache_module.MAX_TOMBSTONES
