"""The progress report: ``GET /progress`` on a port of rank 0, and ``progress.json`` in the folder of the metrics.

It changes only after completed work, never by a timer, so that a trainer without progress shows none. ``worker``
creates it and sets its phases, ``MetricsLogger`` updates it, and the operator polls it.
"""

import collections
import contextlib
import math
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ddprun.files import BackgroundWrite, dumps_json, finite, write_atomically

SCHEMA = 3  # the number of the termination report's; 1 has no path of a checkpoint
_CONNECTIONS = 16  # open at once; a new connection ends the oldest of them
_FILE_PATIENCE = 30.0  # seconds at the end for a volume to take the file
_FILE_INTERVAL = 1.0  # seconds between writes of progress.json; one per step would load a network volume


class Progress:
    """The last completed work; thread-safe."""

    def __init__(self, world_size: int, data: str) -> None:
        self._lock = threading.Lock()
        self._seq, self._changed, self._written = 0, time.monotonic(), -math.inf
        self._file: Path | None = None
        self._copy = BackgroundWrite(self._write_file)
        self._values: dict[str, Any] = {
            "phase": "start", "epoch": 0, "totalEpochs": None, "step": 0, "totalSteps": None,
            "loss": None, "accuracy": None, "samplesPerSecond": None,
            "worldSize": world_size, "data": data, "checkpoint": None, "checkpointProblem": None, "resumedFrom": None,
        }  # fmt: skip

    def write_to(self, path: Path) -> None:
        """Keep ``path`` up to date from now on: about once a second, and at every change of phase."""
        self._file = path

    def wait_for_file(self) -> None:
        """Wait until the file has the newest report; not for ever, because it is only a copy."""
        self._copy.wait(_FILE_PATIENCE)

    def update(self, **values: Any) -> None:
        """Record completed work and increment ``seq``."""
        with self._lock:
            phase_changed = values.get("phase", self._values["phase"]) != self._values["phase"]
            self._values.update(finite(values))
            self._seq, self._changed = self._seq + 1, time.monotonic()
        if self._file is not None and (phase_changed or self._changed - self._written > _FILE_INTERVAL):
            self._written = self._changed
            self._copy.request()

    def _write_file(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):  # only a copy; the next save reports a volume that fails
            write_atomically(self._file, dumps_json(self.snapshot()).encode(), durable=False)

    def snapshot(self) -> dict[str, Any]:
        """Return the report as a dict; ``ageSeconds`` is the time since the last completed work."""
        with self._lock:
            age = round(time.monotonic() - self._changed, 3)
            return {"schema": SCHEMA, "seq": self._seq, "ageSeconds": age, **self._values}

    def serve(self, port: int) -> None:
        """Answer GET /progress and /healthz from a daemon thread.

        Raises:
            OSError: the port cannot be bound.
        """
        server = _Server(("", port), _Handler)  # all addresses: the operator polls the pod's
        server.progress = self
        threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()


class _Server(ThreadingHTTPServer):
    """Serves a limited number of connections: descriptors and threads are those of the training."""

    progress: Progress
    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, *args: Any) -> None:
        self._connections: collections.deque[Any] = collections.deque()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; end the oldest connection first if there are too many."""
        while len(self._connections) >= _CONNECTIONS:
            with contextlib.suppress(OSError, IndexError):  # its thread has just ended
                self._connections.popleft().shutdown(socket.SHUT_RDWR)
        self._connections.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection."""
        with contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Bind for IPv4 and IPv6, without the base class's reverse lookup, which hangs if DNS does."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a poller that disconnects: it is not worth a traceback in the log."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5  # seconds, after which an idle connection releases its thread

    def do_GET(self) -> None:
        answers = {"/progress": self.server.progress.snapshot(), "/healthz": {"ok": True}}
        body = dumps_json(answers.get(self.path, {"error": "not found"})).encode()
        self.send_response(200 if self.path in answers else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: there is a poll every few seconds."""
