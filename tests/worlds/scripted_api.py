"""An API server with one job, which serves the logs that a test writes, over plain HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlparse

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.processes import eventually
from tests.worlds.kubeconfig import write_kubeconfig

TIME = "2026-01-02T03:04:05Z"
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"


class ScriptedApi:
    """Use as a context manager. Its job ``mnist`` runs in attempt 1 until ``finish``; all its pods run.

    log: writes the answer to a request for the log of a node; its first argument is the handler.
    """

    def __init__(self, folder: Path, log: Callable[[Answer, int, dict[str, str]], None], *, nodes: int = 1) -> None:
        self.requests: list[str] = []
        self.open = 0
        """Requests that are not answered to the end."""
        self.ended = threading.Event()
        """The test is over, and the job has finished."""
        self._log, self._nodes, self._counting = log, nodes, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answer,), {"api": self}))
        self._server.daemon_threads = True
        server = f"http://127.0.0.1:{self._server.server_port}"
        self.kubeconfig = write_kubeconfig(folder / "kubeconfig", server, {})

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def asked(self, what: str) -> int:
        """Return how many requests had a path with this text."""
        return sum(what in path for path in list(self.requests))

    def is_left_alone(self) -> None:
        """Wait until no request is open."""
        eventually("no request is open", lambda: self.open == 0)

    @property
    def job(self) -> Json:
        finished = self.ended.is_set()
        condition = {"type": "Finished", "status": "True", "reason": "AllNodesSucceeded", "message": ""}
        status = {"state": "Succeeded" if finished else "Running", "attempt": 1, "observedGeneration": 1}
        metadata = {"name": "mnist", "namespace": "default", "uid": UID, "generation": 1, "creationTimestamp": TIME}
        return {
            "apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind,
            "metadata": metadata | {"resourceVersion": "20" if finished else "10"},
            "spec": {"image": "none", "numNodes": self._nodes, "nprocPerNode": 1, "checkpoint": {"claimName": "c"}},
            "status": status | {"conditions": [condition | {"lastTransitionTime": TIME}] if finished else []},
        }  # fmt: skip


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    api: ScriptedApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with self.api._counting:
            self.api.requests.append(self.path)
            self.api.open += 1
        try:
            self._route()
        except ConnectionError:
            self.close_connection = True
        finally:
            with self.api._counting:
                self.api.open -= 1

    def begin(self) -> None:
        """Send the head of an answer in chunks."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send(self, text: str) -> None:
        """Send a chunk; an empty one is the last."""
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def until(self, event: threading.Event) -> None:
        """Wait for an event, or until the client closes the connection."""
        while not event.wait(0.02):
            self.connection.settimeout(0.001)
            try:
                if not self.connection.recv(1):
                    raise ConnectionError
            except TimeoutError:
                pass

    def refuse(self, status: int, text: str) -> None:
        self._json({"kind": "Status", "code": status, "message": text}, status)

    def log_request(self, *_: object) -> None:
        """Print nothing."""

    def _route(self) -> None:
        path, query = urlparse(self.path).path, dict(parse_qsl(urlparse(self.path).query))
        if path.endswith("/log"):
            self.api._log(self, int(path.split("/")[-2].rpartition("-")[2]), query)
        elif "/pods/" in path:
            state: Json = {"terminated": {"exitCode": 0}} if self.api.ended.is_set() else {"running": {}}
            trainer = {"name": names.TRAINER_CONTAINER, "state": state}
            self._json({"kind": "Pod", "metadata": {}, "status": {"phase": "Running", "containerStatuses": [trainer]}})
        elif query.get("watch"):
            self._watch(float(query["timeoutSeconds"]), query["resourceVersion"])
        elif path.endswith("/ddpjobs"):
            version = {"resourceVersion": self.api.job["metadata"]["resourceVersion"]}
            self._json({"kind": "DDPJobList", "metadata": version, "items": [self.api.job]})
        else:
            self._json(self.api.job)

    def _watch(self, seconds: float, version: str) -> None:
        self.begin()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (job := self.api.job)["metadata"]["resourceVersion"] > version:
                self.send(json.dumps({"type": "MODIFIED", "object": job}) + "\n")
                break
            step = threading.Event()
            threading.Timer(0.1, step.set).start()
            self.until(step)
        self.send("")

    def _json(self, body: Json, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
