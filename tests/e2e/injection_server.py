"""An admission webhook that injects a sidecar into pods, as Istio's does.

    python3 injection_server.py PORT CERTIFICATE KEY CONTAINER

It imports only Python's standard library, so that it also runs as a program in a pod. There it injects into every pod,
as a mesh does whose policy is not the pod's to decide.
"""

from __future__ import annotations

import base64
import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class InjectionServer(ThreadingHTTPServer):
    """Answers with a patch that adds ``container``."""

    def __init__(self, port: int, certificate: str, key: str, container: dict[str, Any]) -> None:
        super().__init__(("", port), _Handler)
        self.container = container
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def response(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to an admission request."""
        allowed = {"uid": request["uid"], "allowed": True}
        patch = json.dumps([{"op": "add", "path": "/spec/containers/-", "value": self.container}])
        return allowed | {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}


class _Handler(BaseHTTPRequestHandler):
    server: InjectionServer

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        body = json.dumps(kind | {"response": self.server.response(review["request"])}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


if __name__ == "__main__":
    port, certificate_file, key_file, sidecar = sys.argv[1:]
    InjectionServer(int(port), certificate_file, key_file, json.loads(sidecar)).serve_forever()
