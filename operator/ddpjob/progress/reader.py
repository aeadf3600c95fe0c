"""Read ``GET /progress`` of a pod: a minimal HTTP client for a server that a tenant wrote.

It reads one status line and at most ``MAX_BYTES`` in total, in a few reads, within one deadline. It runs in a thread
with an event loop of its own, so that no server's behaviour and no large response delay a reconcile.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ddpjob.api.objects import Json
from ddpjob.api.report import TrainingReport, training_report

T = TypeVar("T")

TIMEOUT_SECONDS = 2.0
MARGIN_SECONDS = 5.0
"""How much later a request fails if the thread does not respond."""
MAX_BYTES = 64 * 1024
MAX_CONNECTIONS = 512  # a pod that does not respond holds a connection for two seconds
PAUSE_SECONDS = 0.05
"""Pause between two reads of a response, so that a server that sends single bytes causes forty reads and no more."""

Target = tuple[str, str, int]
"""Pod name, IP address, port."""


class UnusableAnswerError(Exception):
    """The response is not a progress report."""


class ProgressReader:
    """Sends requests from a thread of its own, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def ask(self, target: Target) -> TrainingReport:
        """Return the report of a pod.

        Raises:
            UnusableAnswerError: the response is no report.
            OSError: there is no response; ``TimeoutError`` after ``TIMEOUT_SECONDS``.
        """
        async with asyncio.timeout(TIMEOUT_SECONDS + MARGIN_SECONDS):
            return await self._run(self._ask(target))

    def close(self) -> None:
        """End the thread, and with it every request."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MARGIN_SECONDS)
        self._loop = self._thread = None

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="progress", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _ask(self, target: Target) -> TrainingReport:
        async with asyncio.timeout(TIMEOUT_SECONDS), self._slots:
            return training_report(parse(await _get(*target[1:])))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then cancel what still runs in it."""
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _get(address: str, port: int) -> bytes:
    """Return the body of the response to ``GET /progress``; no name is resolved and no proxy is used."""
    loop = asyncio.get_running_loop()
    is_v6 = ":" in address
    host = f"[{address}]" if is_v6 else address
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (address, port))
        # A server answers a request of HTTP/1.0 without chunks, and closes the connection at the end.
        request = f"GET /progress HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n\r\n"
        await loop.sock_sendall(connection, request.encode())
        received = b""
        while chunk := await loop.sock_recv(connection, MAX_BYTES + 1 - len(received)):
            received += chunk
            if (body := complete_body(received)) is not None:
                return body
            if len(received) > MAX_BYTES:
                raise UnusableAnswerError(f"longer than {MAX_BYTES} bytes")
            await asyncio.sleep(PAUSE_SECONDS)
    return complete_body(received, is_end=True) or b""


def complete_body(received: bytes, *, is_end: bool = False) -> bytes | None:
    """Return the body of a response; None if more of it may follow.

    is_end: the server has closed the connection.

    Raises:
        UnusableAnswerError: the response is not one of status 200 with a plain body.
        ConnectionResetError: the connection has ended before the response, because rank 0 ended: there is no response.
    """
    status, has_status, _ = received.partition(b"\r\n")
    cut = ConnectionResetError("the response is cut")
    if not has_status and b"HTTP/1.".startswith(status[:7]):
        if is_end:
            raise cut
        return None
    if not (status.startswith(b"HTTP/1.") and status.split(b" ")[1:2] == [b"200"]):
        raise UnusableAnswerError(f"not HTTP 200: {status[:40]!r}")
    head, has_head, body = received.partition(b"\r\n\r\n")
    if not has_head:
        if is_end:
            raise cut
        return None
    headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if headers.get(b"transfer-encoding", b"").strip():
        raise UnusableAnswerError("the body is encoded in chunks, which HTTP/1.0 does not have")
    length = headers.get(b"content-length", b"").strip()
    if length.isdigit():
        if is_end and len(body) < int(length[:9]):
            raise cut
        return body[: int(length[:9])] if len(body) >= int(length[:9]) else None
    return body if is_end else None


def parse(body: bytes) -> Json:
    """Return the JSON object; NaN and infinities, which are no JSON, are texts. Raises ``UnusableAnswerError``."""
    try:
        value = json.loads(body, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswerError(f"not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise UnusableAnswerError("not a JSON object")
    return value
