"""The exec of a pod over a WebSocket, as an API server offers it: the program runs as a process here.

It can cut connections, and refuse them.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import os
import socketserver
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any, Self

from ddpjob.api.objects import Json
from ddpjob.client.volume import reader
from ddpjob.client.volume.reader_pod import SOURCE_ENV

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
_STDOUT, _STDERR, _STATUS = b"\1", b"\2", b"\3"
_FRAME = 32 * 1024


class ExecServer:
    """Use as a context manager. root: what the pod has at /checkpoints.

    cuts: the first connections are cut after so many bytes of output. refusals: status codes of the first answers.
    """

    def __init__(self, root: Path, *, cuts: tuple[int, ...] = (), refusals: tuple[int, ...] = ()) -> None:
        self.root, self.cuts, self.refusals = root, [*cuts], [*refusals]
        self.paths: list[str] = []
        self.commands: list[list[str]] = []
        handler = type("Handler", (_Handler,), {"exec": self})
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def kubeconfig(self) -> Json:
        server = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }


class _Handler(socketserver.StreamRequestHandler):
    exec: ExecServer

    def handle(self) -> None:
        target = self.rfile.readline().split()[1].decode()
        headers = {}
        while line := self.rfile.readline().strip().decode():
            key, _, value = line.partition(": ")
            headers[key.lower()] = value
        path, _, query = target.partition("?")
        self.exec.paths.append(path)
        if headers.get("authorization") != "Bearer secret":
            return self._refuse(401)
        if self.exec.refusals:
            return self._refuse(self.exec.refusals.pop(0))
        accept = base64.b64encode(hashlib.sha1((headers["sec-websocket-key"] + _GUID).encode()).digest()).decode()  # noqa: S324
        protocol = headers["sec-websocket-protocol"]
        head = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
        head += [f"Sec-WebSocket-Accept: {accept}", f"Sec-WebSocket-Protocol: {protocol}"]
        self.wfile.write("\r\n".join([*head, "", ""]).encode())
        return self._run([value for key, value in urllib.parse.parse_qsl(query) if key == "command"])

    def _refuse(self, code: int) -> None:
        body = json.dumps({"kind": "Status", "message": f"refused with {code}", "code": code}).encode()
        self.wfile.write(f"HTTP/1.1 {code} Refused\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _run(self, command: list[str]) -> None:
        self.exec.commands.append(command)
        words = [sys.executable, *(str(self.exec.root) if word == "/checkpoints" else word for word in command[1:])]
        env = os.environ | {SOURCE_ENV: inspect.getsource(reader)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        left = self.exec.cuts.pop(0) if self.exec.cuts else sys.maxsize
        with subprocess.Popen(words, env=env, **pipes) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            while data := process.stdout.read1(min(_FRAME, left)):  # type: ignore[attr-defined]
                self._frame(_STDOUT + data)
                left -= len(data)
                if left <= 0:
                    process.kill()
                    return
            errors = process.stderr.read()
        if errors:
            self._frame(_STDERR + errors)
        cause = {"reason": "ExitCode", "message": str(process.returncode)}
        failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        self._frame(_STATUS + json.dumps(failed if process.returncode else {"status": "Success"}).encode())
        self.wfile.write(b"\x88\x00")

    def _frame(self, payload: bytes) -> None:
        size = len(payload)
        length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
        self.wfile.write(b"\x82" + length + payload)
