"""When a watch counts as open or failing, and what follows for the operator's readiness."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob_operator.controller.watch_status import Report, WatchStatus, readiness, scope_report
from tests.processes import eventually_async
from tests.worlds.loopback import serving

PATH = f"/{names.PODS.path('team')}"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Answers every watch with ``status``; an open stream receives what ``send`` gets."""

    def __init__(self) -> None:
        self.status, self.disconnects = 200, False
        self._streams: list[web.StreamResponse] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.disconnects and request.transport is not None:
            request.transport.close()
        if self.status != 200:
            return web.Response(status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        self._streams.append(response)
        await asyncio.sleep(600)
        return response

    async def send(self, data: bytes) -> None:
        await self._streams[-1].write(data)


@asynccontextmanager
async def a_watch(clock: Clock) -> AsyncIterator[tuple[Server, WatchStatus, Callable[[], Awaitable[object]]]]:
    """Yield a server, the status of a watch of it, and a function that opens the watch once more."""
    server, status = Server(), WatchStatus(names.PODS, "team", clock=clock)
    async with serving(server.handle) as url, aiohttp.ClientSession(middlewares=(status.middleware,)) as session:
        yield server, status, lambda: session.get(f"{url}{PATH}", params={"watch": "true"})


async def test_watch_is_open_while_it_receives_data() -> None:
    clock = Clock()
    async with a_watch(clock) as (server, status, open_watch):
        assert status.report() == ("starting", f"the watch of {PATH} is not open yet")
        assert status.age == math.inf
        await open_watch()
        assert status.report() == ("open", "")
        clock.now += 89
        assert status.report()[0] == "open"
        await server.send(b"bookmark")

        def heard() -> bool:
            status.sample()
            return status.age == 0

        await eventually_async("the data is noticed", heard)
        clock.now += 91
        assert status.report() == ("failing", f"the watch of {PATH} has received no data for 91 s")


async def test_watch_that_is_opened_again_and_again_without_data_fails() -> None:
    clock = Clock()
    async with a_watch(clock) as (_, status, open_watch):
        for _ in range(5):
            await open_watch()
            clock.now += 70
            status.fail("no data", explains=False)
        assert status.age == 350
        assert status.report()[0] == "failing"


async def test_error_of_the_server_is_logged_once_and_explains_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with a_watch(clock) as (server, status, open_watch):
        server.status = 403
        for _ in range(10):
            await open_watch()
            clock.now += 60
        assert status.report()[1] == f"the watch of {PATH} is not open: the API server answered 403 Forbidden"
        assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1, "logged once"
        server.status = 200
        await open_watch()
        assert status.report() == ("open", "")


async def test_a_refusal_explains_more_than_the_end_of_the_session_that_follows_it() -> None:
    """Seen: kopf replaces the session while it has requests, and "Server disconnected" hid that they were refused."""
    async with a_watch(Clock()) as (server, status, open_watch):

        async def disconnected() -> None:
            server.disconnects = True
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await open_watch()
            server.disconnects = False

        server.status = 401
        await open_watch()
        await disconnected()
        assert status.report()[1].endswith("the API server answered 401 Unauthorized")
        server.status = 200
        await open_watch()
        await disconnected()
        assert status.report()[1].endswith("ServerDisconnectedError: Server disconnected"), "nothing was refused since"


OPEN, STARTING, FAILING = ("open", ""), ("starting", "not yet"), ("failing", "HTTP 403")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({"a": OPEN, "b": OPEN}, (True, "ok")),
        ({"a": OPEN, "b": FAILING}, (True, "namespace b is not served: HTTP 403")),
        ({"a": OPEN, "b": STARTING}, (False, "namespace b is not served: not yet")),
        ({None: FAILING}, (False, "HTTP 403")),
    ],
)
def test_readiness_needs_one_served_scope_and_none_that_is_starting(
    reports: dict[str | None, Report], expected: tuple[bool, str]
) -> None:
    assert readiness(reports) == expected


def test_scope_that_cannot_be_listed_fails() -> None:
    status = WatchStatus(names.PODS, None)
    assert scope_report("HTTP 403", [status]) == ("failing", "HTTP 403")
    assert scope_report("", [status])[0] == "starting"
    status.fail("broken")
    assert scope_report("", [WatchStatus(names.DDPJOBS, None), status])[0] == "failing"
