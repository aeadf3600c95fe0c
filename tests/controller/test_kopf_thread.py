"""kopf in its thread is replaced whenever its watch is not open, and leaves nothing behind. No API server runs here."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.controller import job_watch
from ddpjob_operator.controller.cache import Cache, Key
from ddpjob_operator.controller.job_watch import JobWatch
from ddpjob_operator.controller.watch_status import WatchStatus
from tests.processes import eventually_async
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.http import MemoryHttp

JOB = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "spec": {"image": "trainer:1"}}
ERROR = b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"injected"}}\n'


class Server(MemoryHttp):
    """Leaves the group out of the list of groups while ``hides_group``; ends ``broken`` watches with an error.

    Answers requests for ``path``, by default the kinds of the group, with ``status``, and counts these ``refusals``.
    """

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.hides_group = False
        self.broken = 0
        self.status = 200
        self.path = f"/apis/{names.API_VERSION}"
        self.refusals: list[float] = []
        """When they were."""
        self.group_lists = 0

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.status != 200 and request.path == self.path:
            self.refusals.append(time.monotonic())
            return web.Response(status=self.status)
        if request.path == "/apis":
            self.group_lists += 1
            if self.hides_group:
                return web.json_response({"kind": "APIGroupList", "groups": []})
        if self.broken and request.query.get("watch") == "true":
            self.broken -= 1
            return web.Response(body=ERROR)
        return await super()._handle(request)


@asynccontextmanager
async def watching(
    tmp_path: Path, cluster: MemoryCluster, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[Server, JobWatch]]:
    async with Server(cluster) as http:
        connection = await Connection.open(str(http.kubeconfig(tmp_path)))
        status = WatchStatus(names.DDPJOBS, None, clock=clock)
        yield http, JobWatch(connection=connection, cache=Cache(), scope=None, status=status)


def kopf_threads() -> int:
    return sum(thread.name.startswith("kopf") for thread in threading.enumerate())


async def assert_job_arrives(cluster: MemoryCluster, watch: JobWatch, name: str) -> None:
    cluster.server.create(names.DDPJOBS, "default", JOB | {"metadata": {"name": name}})
    await eventually_async("the job is cached", lambda: watch.cache.job(Key("default", name)))


async def test_kopf_that_found_nothing_to_watch_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of groups may be older than the kind, and it reads the list only once."""
    monkeypatch.setattr(job_watch, "STALL_SECONDS", 2.0)
    cluster = MemoryCluster()
    async with watching(tmp_path, cluster) as (http, watch):
        http.hides_group = True
        task = asyncio.create_task(watch.run())
        await eventually_async("kopf was replaced", lambda: http.group_lists >= 2)
        assert "kopf has sent no request" in watch.status.report()[1]
        http.hides_group = False
        await assert_job_arrives(cluster, watch, "mnist")
        await eventually_async("the watch is open", lambda: watch.status.report() == ("open", ""))
        task.cancel()
        await asyncio.wait({task})
        assert kopf_threads() == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/apis", "403 Forbidden"),
        (f"/apis/{names.API_VERSION}", "401 Unauthorized"),
        (f"/apis/{names.API_VERSION}", "503 Service Unavailable"),
        (f"/{names.DDPJOBS.path()}", "403 Forbidden"),
    ],
)
async def test_request_of_kopf_that_is_refused_is_named(tmp_path: Path, path: str, status: str) -> None:
    async with watching(tmp_path, MemoryCluster()) as (http, watch):
        http.path, http.status = path, int(status[:3])
        task = asyncio.create_task(watch.run())
        await eventually_async("it is noted", lambda: watch.status.is_failing)
        assert watch.status.report()[1].endswith(f"the API server answered {status}")
        task.cancel()
        await asyncio.wait({task})
        assert kopf_threads() == 0


async def test_kopf_whose_credentials_are_refused_reads_them_again_ever_less_often(tmp_path: Path) -> None:
    """It has no delay of its own: it sent a request for every login, and a login for every request."""
    async with watching(tmp_path, MemoryCluster()) as (http, watch):
        http.path, http.status = f"/{names.DDPJOBS.path()}", 401
        task = asyncio.create_task(watch.run())
        await eventually_async("several logins", lambda: len(http.refusals) >= 6)
        _, second, *_, sixth = http.refusals[:6]
        assert sixth - second > 1.0
        http.status = 200
        await eventually_async("the watch is open", lambda: watch.status.report() == ("open", ""))
        task.cancel()
        await asyncio.wait({task})


async def test_each_error_of_the_watch_ends_one_thread_and_starts_another(tmp_path: Path) -> None:
    cluster, failures = MemoryCluster(), 0
    tasks = asyncio.all_tasks()
    async with watching(tmp_path, cluster) as (http, watch):

        def count() -> None:
            nonlocal failures
            failures += 1
            assert kopf_threads() <= 1, "the thread that failed has ended before the next one starts"

        watch.status._on_failure = count
        http.broken = 3
        task = asyncio.create_task(watch.run())
        await eventually_async("the watch is open", lambda: failures == 3 and watch.status.is_open)
        await assert_job_arrives(cluster, watch, "mnist")
        assert http.group_lists == 4
        assert kopf_threads() == 1
        task.cancel()
        await asyncio.wait({task})
        assert kopf_threads() == 0
        assert {t for t in asyncio.all_tasks() - tasks if "kopf" in t.get_name()} == set()
