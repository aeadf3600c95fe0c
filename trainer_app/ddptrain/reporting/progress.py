"""What rank 0 tells while it works: ``GET /progress`` on a port, and ``progress.json`` beside the metrics.

Updated only after completed work, never by a timer: a silent trainer must look silent. ``worker`` makes it and marks
its phases, ``telling``, ``recorder`` and ``journal`` tell it what was done, the operator polls it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ddptrain.files import dumps, finite, write_atomically

SCHEMA = 1
_FILE_INTERVAL = 1.0  # seconds; a network volume should not see a write per step


class Progress:
    """The last completed piece of work, safe to read from the server's threads."""

    def __init__(self, world_size: int, data: str) -> None:
        self._lock = threading.Lock()
        self._seq, self._changed, self._written = 0, time.monotonic(), -math.inf
        self._file: Path | None = None
        self._values: dict[str, Any] = {
            "phase": "start", "epoch": 0, "totalEpochs": None, "step": 0, "totalSteps": None,
            "loss": None, "accuracy": None, "samplesPerSecond": None,
            "worldSize": world_size, "data": data, "checkpoint": None, "checkpointProblem": None, "resumedFrom": None,
        }  # fmt: skip

    def write_to(self, path: Path) -> None:
        """From now on keep ``path`` up to date, about once a second and at every change of phase."""
        self._file = path

    def update(self, **values: Any) -> None:
        """Record completed work; every call counts as one more piece of it."""
        with self._lock:
            turns = values.get("phase", self._values["phase"]) != self._values["phase"]
            self._values.update(finite(values))
            self._seq, self._changed = self._seq + 1, time.monotonic()
        if self._file is not None and (turns or self._changed - self._written > _FILE_INTERVAL):
            self._written = self._changed
            with contextlib.suppress(OSError):  # a convenience copy; a sick volume is reported by the save it costs
                write_atomically(self._file, dumps(self.snapshot()).encode(), durable=False)

    def snapshot(self) -> dict[str, Any]:
        """The state as trainer-interface spells it; ``ageSeconds`` is the time since the last completed work."""
        with self._lock:
            age = round(time.monotonic() - self._changed, 3)
            return {"schema": SCHEMA, "seq": self._seq, "ageSeconds": age, **self._values}

    def serve(self, port: int) -> None:
        """Answer GET /progress and /healthz from a daemon thread.

        Raises:
            OSError: the port cannot be bound.
        """
        server = _Server(("", port), _handler(self))  # every address: the operator polls the pod's
        threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        """Bind for both IP families, without the base class's reverse lookup, which can hang where DNS does."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A poller that hangs up is no event worth a traceback in the training log."""


def _handler(progress: Progress) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # seconds; an idle connection must not hold a thread for ever

        def do_GET(self) -> None:
            answers = {"/progress": progress.snapshot(), "/healthz": {"ok": True}}
            found = self.path in answers
            body = dumps(answers.get(self.path, {"error": "not found"})).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Silent: a poll every few seconds would drown the training log."""

    return Handler
