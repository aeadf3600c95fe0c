"""What a kubelet serves to the API server: the logs of its pods, with timestamps, ``sinceTime`` and ``follow``.

The control plane of the tests has no kubelet. The API server connects to this one at the address in its Node.
"""

from __future__ import annotations

import ssl
import threading
import urllib.parse
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from ddpjob import DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.client.worlds import TIME
from tests.worlds.control_plane import ControlPlane

PER_SECOND = 4
"""Lines with the same second; a client that resumes gets them again."""


class Log:
    """The lines of a container, and whether it has ended."""

    def __init__(self) -> None:
        self.lines: list[tuple[datetime, str]] = []
        self.has_ended = False


class Kubelet:
    """Use as a context manager; its node has the name of the namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.logs: dict[str, Log] = {}
        self.changed = threading.Condition()
        self._plane = plane
        self._namespace = namespace
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"kubelet": self}))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(plane.ca_file, plane.ca_file.with_suffix(".key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._plane.request("POST", "/api/v1/nodes", {"metadata": {"name": self._namespace}})
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_port}},
        }
        self._plane.request("PATCH", f"/api/v1/nodes/{self._namespace}/status", {"status": status})
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            for log in self.logs.values():
                log.has_ended = True
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._plane.request("DELETE", f"/api/v1/nodes/{self._namespace}")

    def start(self, job: DDPJob, attempt: int, node: int = 0) -> str:
        """Create the pod of a node, with a running trainer, and return its name."""
        pod = names.pod_name(job.name, str(job.uid), attempt, node)
        self.logs[pod] = Log()
        container = {"name": names.TRAINER_CONTAINER, "image": "none"}
        spec = {"nodeName": self._namespace, "containers": [container], "restartPolicy": "Never"}
        body = {"metadata": {"name": pod}, "spec": spec}
        self._plane.request("POST", f"/api/v1/namespaces/{self._namespace}/pods", body)
        self._set(pod, {"running": {"startedAt": TIME}})
        return pod

    def serve(self, pod: str, lines: list[str]) -> None:
        """Serve the whole log of a pod that another program created."""
        self.logs[pod] = Log()
        for line in lines:
            self.print(pod, line)
        self.logs[pod].has_ended = True

    def print(self, pod: str, text: str) -> None:
        """Print a line; ``PER_SECOND`` lines have the same second, and two of them the same time."""
        with self.changed:
            log = self.logs[pod]
            count = len(log.lines)
            time = datetime.fromisoformat(TIME) + timedelta(seconds=count // PER_SECOND, microseconds=count % 3)
            log.lines.append((time, text))
            self.changed.notify_all()

    def end(self, pod: str) -> None:
        """End the trainer, as the API server shows it first, and then its log."""
        self._set(pod, {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": TIME, "finishedAt": TIME}})
        with self.changed:
            self.logs[pod].has_ended = True
            self.changed.notify_all()

    def _set(self, pod: str, state: Json) -> None:
        trainer = {"name": names.TRAINER_CONTAINER, "image": "none", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Running", "containerStatuses": [trainer | {"state": state}]}
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}/status"
        self._plane.request("PATCH", path, {"status": status})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: tests cut connections."""


class _Handler(BaseHTTPRequestHandler):
    kubelet: Kubelet
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        options = dict(urllib.parse.parse_qsl(query))
        with_time = options.get("timestamps") == "true"
        log, sent = self.kubelet.logs[path.split("/")[3]], 0
        since = datetime.fromisoformat(options.get("sinceTime", TIME))
        if "sinceSeconds" in options:  # as if it were the second of the last line now
            since = log.lines[-1][0] - timedelta(seconds=int(options["sinceSeconds"]))
        if "tailLines" in options:
            sent = max(0, len(log.lines) - int(options["tailLines"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            with self.kubelet.changed:
                lines, has_ended = log.lines[sent:], log.has_ended
                if not lines and not has_ended and options.get("follow") == "true":
                    self.kubelet.changed.wait(1.0)
                    continue
            for time, text in lines:
                if time >= since:
                    stamp = f"{time.isoformat(timespec='microseconds').replace('+00:00', 'Z')} " if with_time else ""
                    self._chunk(f"{stamp}{text}".encode())
            sent += len(lines)
            if not lines:
                self._chunk(b"")
                return

    def _chunk(self, data: bytes) -> None:
        """Write a chunk in two parts, so that a line may arrive in parts."""
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]) if data else (b"",):
            if part or not data:
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of http.server
        pass
