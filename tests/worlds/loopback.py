"""An HTTP server of a test on loopback."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, *, shutdown_seconds: float = 0.1) -> AsyncIterator[str]:
    """Serve requests with ``handler`` inside the block, and yield the URL."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=shutdown_seconds)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()
