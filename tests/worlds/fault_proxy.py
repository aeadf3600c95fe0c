"""A proxy on loopback in front of the API server that injects the faults of a test.

It runs in a separate thread, with plain HTTP to the client and TLS to the server. Watches are streamed.
"""

import asyncio
import random
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import aiohttp
from aiohttp import web

from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane


@dataclass(frozen=True)
class Fault:
    """The fault of one request.

    status: the status of the answer; the request is not forwarded. 0 closes the connection instead.
    after_commit: forward the request first, and replace only its answer.
    hold: seconds to wait first.
    forward: then forward the request and its answer unchanged; with ``hold``, the fault is only slow.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    after_commit: bool = False
    hold: float = 0.0
    forward: bool = False


@dataclass(frozen=True)
class Seen:
    """A received request: loop time, method and path with query."""

    time: float
    method: str
    path: str


Rule = Callable[[web.BaseRequest], Fault | None]


def a_third_fails(seed: int) -> Rule:
    """Return a rule by which a third of all requests is refused, lost, throttled, or carried out without an answer."""
    dice = random.Random(seed)
    faults = (
        Fault(status=503),
        Fault(status=500, after_commit=True),
        Fault(after_commit=True),
        Fault(),
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(status=409, body='{"kind":"Status","reason":"Conflict","message":"injected"}'),
    )
    return lambda request: dice.choice(faults) if dice.random() < 1 / 3 else None


class FaultProxy:
    """Use as a context manager. ``server`` is its address. ``rule`` returns the fault of a request, or None."""

    def __init__(self, plane: ControlPlane) -> None:
        self.rule: Rule = lambda request: None
        self.seen: list[Seen] = []
        self.server = ""
        self._plane = plane
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fault proxy")
        self._stop = asyncio.Event()
        self._transports: dict[asyncio.Transport, str] = {}  # with the path of the open request

    def __enter__(self) -> Self:
        self._thread.start()
        eventually("the proxy listens", lambda: self.server)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=30)

    def once(self, method: str, path_part: str, fault: Fault, times: int = 1) -> None:
        """Inject ``fault`` into the next ``times`` requests with that method and ``path_part`` in the path."""
        left = times

        def rule(request: web.BaseRequest) -> Fault | None:
            nonlocal left
            if left and request.method == method and path_part in request.path:
                left -= 1
                return fault
            return None

        self.rule = rule

    def cut(self, path_part: str = "") -> None:
        """Break every open connection with ``path_part`` in the path of its request, above all the watches."""
        self._loop.call_soon_threadsafe(self._cut, path_part)

    def _cut(self, path_part: str) -> None:
        for transport, path in list(self._transports.items()):
            if path_part in path:
                transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        context = ssl.create_default_context(cafile=str(self._plane.ca_file))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.server = f"http://{host}:{port}"
            await self._stop.wait()
            self._cut("")
            await runner.cleanup()
            handlers = asyncio.all_tasks() - {asyncio.current_task()}
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(Seen(self._loop.time(), request.method, request.path_qs))
        fault = self.rule(request)
        if fault is None:
            return await self._forward(request)
        await asyncio.sleep(fault.hold)
        if fault.forward:
            return await self._forward(request)
        if fault.after_commit:
            async with self._upstream(request, await request.read()) as answer:
                await answer.read()
        if fault.status == 0 and request.transport is not None:
            request.transport.abort()
        return web.Response(status=fault.status or 502, headers=fault.headers, text=fault.body)

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is None:  # the client closed its connection
            return web.Response(status=502)
        self._transports[transport] = request.path  # before the answer: ``cut`` also breaks what waits for one
        try:
            return await self._pass_on(request)
        except (aiohttp.ClientError, ConnectionError):
            transport.abort()  # one side closed its connection: close the other
            return web.Response(status=502)
        finally:
            self._transports.pop(transport, None)

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        async with self._upstream(request, await request.read()) as answer:
            skipped = {"transfer-encoding", "content-length", "connection"}
            headers = [(key, value) for key, value in answer.headers.items() if key.lower() not in skipped]
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    def _upstream(
        self, request: web.BaseRequest, body: bytes
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        headers = {key: value for key, value in request.headers.items() if key.lower() != "host"}
        url = self._plane.server + request.path_qs
        # None for an empty body: aiohttp would add a Content-Type, and the API server would answer 415.
        return self._session.request(request.method, url, data=body or None, headers=headers, allow_redirects=False)
