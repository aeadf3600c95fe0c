"""Serve /healthz, /readyz and /metrics from a separate thread.

The thread can report an event loop that is blocked. Liveness checks only the event loop, so that Kubernetes does not
kill the operator because the API server is unavailable.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

BLOCKED_SECONDS = 30.0
BEAT_SECONDS = 1.0
CLIENT_SECONDS = 10.0  # a client that sends nothing must not block a thread
MAX_CONNECTIONS = 64

Verdict = tuple[bool, str]
"""Whether the check passes, and one line with the reason if not."""


class LoopHeartbeat:
    """Heartbeat of the event loop. The loop writes it, the health thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    async def run(self, on_lag: Callable[[float], None] = lambda lag: None) -> None:
        """Beat once a second until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(BEAT_SECONDS)
            self._last = self._clock()
            on_lag(max(0.0, self._last - before - BEAT_SECONDS))

    def verdict(self) -> Verdict:
        """Return whether the last beat is at most 30 s old."""
        silent = self._clock() - self._last
        if silent > BLOCKED_SECONDS:
            return False, f"the event loop has been blocked for {silent:.0f} s"
        return True, "ok"


class HealthServer(ThreadingHTTPServer):
    """Serves the three paths until ``close``; ``port`` is the bound port.

    It keeps at most ``MAX_CONNECTIONS``: each has a thread, and every pod of the cluster may reach the port. A new
    connection replaces the oldest, so that idle connections do not keep out the kubelet's probes.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, port: int, *, alive: Callable[[], Verdict], ready: Callable[[], Verdict], metrics: Callable[[], bytes]
    ) -> None:
        self.checks = {"/healthz": alive, "/readyz": ready}
        self.metrics = metrics
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        # Dual stack if the machine has IPv6, because the kubelet probes the pod's address of either family.
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close the port."""
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=5)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MAX_CONNECTIONS else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = CLIENT_SECONDS
    server_version = "ddpjob"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif check := self.server.checks.get(path):
            passes, why = check()
            self._answer(200 if passes else 503, f"{why}\n".encode())
        else:
            self._answer(404, b"try /healthz, /readyz or /metrics\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - overridden
        logger.debug("health: " + format, *args)
