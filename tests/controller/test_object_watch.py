"""The watch of pods against a server that answers as the test wants; faults of a real one are in test_resilience."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.observed import owned_pods
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.object_watch import ObjectWatch
from ddpjob_operator.controller.watch_status import WatchStatus
from tests.worlds.loopback import serving

UID = "0a1b2c3d-0000-4000-8000-000000000000"
Stream = Callable[[web.StreamResponse, int], Awaitable[None]]
"""Writes the events of a watch; the number counts the watches from 0."""


def pod(name: str, version: int, phase: str = "Pending") -> Json:
    owner = {"kind": "DDPJob", "uid": UID, "controller": True}
    labels = {names.LABEL_JOB_NAME: "mnist", names.LABEL_JOB_UID: UID}
    meta = {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "resourceVersion": str(version)}
    return {
        "metadata": meta | {"labels": labels, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": phase},
    }


def event(kind: str, obj: Json) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


class Server:
    """Lists no pods at version 1, later at 100, and streams what the test writes."""

    def __init__(self, stream: Stream) -> None:
        self.since: list[str] = []
        self.selectors: list[str] = []
        self._stream = stream

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.selectors.append(request.query["labelSelector"])
        if request.query.get("watch") != "true":
            return web.json_response({"metadata": {"resourceVersion": "100" if self.since else "1"}, "items": []})
        self.since.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        await self._stream(response, len(self.since) - 1)
        return response


@asynccontextmanager
async def watching(
    server: Server,
    silent_seconds: float = 60.0,
    status: WatchStatus | None = None,
    read_token: Callable[[Configuration], None] | None = None,
) -> AsyncIterator[Cache]:
    """Run a watch of ``server`` and yield the cache that it fills. ``read_token`` is called before each request."""
    async with serving(server.handle) as url:
        configuration = Configuration(host=url)
        configuration.refresh_api_key_hook = read_token
        connection = Connection(None, configuration)
        cluster, cache = KubernetesCluster(connection), Cache()
        watch = ObjectWatch(
            cluster=cluster,
            connection=connection,
            cache=cache,
            scope=None,
            status=status or WatchStatus(names.PODS, None),
            silent_seconds=silent_seconds,
        )
        task = asyncio.create_task(watch.run())
        yield cache
        task.cancel()
        await asyncio.wait({task})
        await cluster.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - the watch offers no event to wait for
            await asyncio.sleep(0.01)


def states(cache: Cache) -> dict[str, str]:
    return {pod.name: pod.state for pod in owned_pods({"metadata": {"uid": UID}}, cache.pods("default", UID))}


async def test_watch_goes_on_from_the_last_event_or_bookmark_after_each_end() -> None:
    async def stream(response: web.StreamResponse, number: int) -> None:
        match number:
            case 0:
                await response.write(event("ADDED", pod("a", 5)) + event("ADDED", pod("b", 7)))
            case 1:
                await response.write(event("BOOKMARK", {"metadata": {"resourceVersion": "40"}}))
            case 2:
                await response.write(event("MODIFIED", pod("a", 50, "Succeeded")) + event("DELETED", pod("b", 51)))
            case _:
                await asyncio.sleep(60)

    server = Server(stream)
    async with watching(server) as cache:
        await until(lambda: len(server.since) == 4)
        assert server.since == ["1", "7", "40", "51"]
        assert server.selectors == [names.SELECTORS[names.PODS]] * 5, "one LIST, four watches"
        assert states(cache) == {"a": "succeeded"}


async def test_watch_whose_version_expired_goes_on_from_a_new_list() -> None:
    async def stream(response: web.StreamResponse, number: int) -> None:
        if number == 0:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(event("ADDED", pod("a", 5)) + event("ERROR", gone))
        await asyncio.sleep(60)

    server = Server(stream)
    async with watching(server):
        await until(lambda: len(server.since) == 2)
        assert server.since == ["1", "100"], "the version of a LIST, not the one that expired"
        assert len(server.selectors) == 4, "two LISTs, two watches"


async def test_events_are_read_however_the_network_divides_them() -> None:
    data = b"".join(event("ADDED", pod(name, version)) for version, name in enumerate("abc", start=2))

    async def stream(response: web.StreamResponse, number: int) -> None:
        for start in range(0, len(data), 7):
            await response.write(data[start : start + 7])
        await asyncio.sleep(60)

    async with watching(Server(stream)) as cache:
        await until(lambda: set(states(cache)) == {"a", "b", "c"})


async def test_silent_watch_is_opened_again() -> None:
    async def stream(response: web.StreamResponse, number: int) -> None:
        if number:
            await response.write(event("ADDED", pod("a", 5)))
        await asyncio.sleep(60)

    server = Server(stream)
    async with watching(server, silent_seconds=0.3) as cache:
        await until(lambda: set(states(cache)) == {"a"})
        assert server.since[:2] == ["1", "1"]


async def test_unreadable_token_interrupts_the_watch_and_does_not_end_it() -> None:
    """For example a file that is empty while it is replaced."""
    ended = False

    async def end(response: web.StreamResponse, number: int) -> None:
        nonlocal ended
        ended = number == 0

    def read_token(configuration: Configuration) -> None:
        nonlocal ended
        if ended:
            ended = False
            raise ConfigException("Token file exists but empty.")

    server, status = Server(end), WatchStatus(names.PODS, None)
    failures: list[str] = []
    status._on_failure = lambda: failures.append("noted")
    async with watching(server, status=status, read_token=read_token):
        await until(lambda: len(server.since) == 2)
        assert failures == ["noted"]


async def test_burst_of_events_leaves_time_for_other_tasks() -> None:
    burst = b"".join(event("ADDED", pod(f"pod-{n}", n + 2)) for n in range(2000))

    async def stream(response: web.StreamResponse, number: int) -> None:
        await response.write(burst)
        await asyncio.sleep(60)

    async with watching(Server(stream)) as cache:
        turns = 0
        while len(cache.pods("default", UID)) < 2000:
            turns += len(cache.pods("default", UID)) > 0
            await asyncio.sleep(0)
        assert turns >= 2000 / 16 / 2
