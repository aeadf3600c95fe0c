"""/healthz, /readyz and /metrics, answered from a thread of their own.

The thread looks at the event loop from outside: a loop that is blocked cannot answer for itself. Liveness asks
only whether the loop turns; an API server that is away must not make Kubernetes kill the operator.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

logger = logging.getLogger(__name__)

BLOCKED_SECONDS = 30.0
BEAT_SECONDS = 1.0
CLIENT_SECONDS = 10.0  # a probe that sends nothing must not hold a thread for ever

Verdict = tuple[bool, str]
"""Whether the check passes, and one line that says why not."""


class Heartbeat:
    """The event loop's sign of life: written by the loop, read by the health thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.lag = 0.0

    async def run(self, on_lag: Callable[[float], None] = lambda lag: None) -> None:
        """Beat for ever, once a second."""
        while True:
            before = self._clock()
            await asyncio.sleep(BEAT_SECONDS)
            self._last = self._clock()
            self.lag = max(0.0, self._last - before - BEAT_SECONDS)
            on_lag(self.lag)

    def verdict(self) -> Verdict:
        """Fails when the loop has not turned for 30 s."""
        silent = self._clock() - self._last
        if silent > BLOCKED_SECONDS:
            return False, f"the event loop has been blocked for {silent:.0f} s"
        return True, "ok"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Dual stack where the machine has IPv6: a kubelet probes the pod's address, whichever family it is of.
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Ipv4Server(ThreadingHTTPServer):
    daemon_threads = True


class HealthServer:
    """Serves the three paths until ``close``; ``port`` is the one that was bound."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        alive: Callable[[], Verdict],
        ready: Callable[[], Verdict],
        metrics: Callable[[], bytes],
    ) -> None:
        handler = _handler(alive, ready, metrics)
        if host and ":" not in host:
            self._server: ThreadingHTTPServer = _Ipv4Server((host, port), handler)
        else:
            self._server = _Server((host, port), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _handler(
    alive: Callable[[], Verdict], ready: Callable[[], Verdict], metrics: Callable[[], bytes]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS
        server_version = "ddpjob"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
            elif path in ("/healthz", "/readyz"):
                passes, why = alive() if path == "/healthz" else ready()
                self._answer(200 if passes else 503, f"{why}\n".encode(), "text/plain; charset=utf-8")
            else:
                self._answer(404, b"try /healthz, /readyz or /metrics\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - overridden
            logger.debug("health: " + format, *args)

    return Handler
