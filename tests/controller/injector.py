"""A mutating admission webhook on loopback that injects a sidecar into pods, as Istio's does."""

import base64
import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from ddpjob.api.objects import Json
from tests.controlplane import ControlPlane

PROXY: Json = {"name": "istio-proxy", "image": "proxy:1"}
KEY = "sidecar.istio.io/inject"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class Injector:
    """Injects an ordinary container into each pod of a namespace, unless a label or an annotation says "false".

    Use as a context manager. The API server calls it by its URL.
    """

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        self._plane = plane
        self._namespace = namespace
        self._certificate, self._key = folder / "injector.crt", folder / "injector.key"
        self._path = f"{CONFIGURATIONS}/injector-{namespace}"

    def __enter__(self) -> Self:
        self._write_certificate()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="injector", daemon=True)
        self._thread.start()
        self._plane.request("POST", CONFIGURATIONS, self._configuration())
        return self

    def __exit__(self, *_: object) -> None:
        self._plane.request("DELETE", self._path)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _write_certificate(self) -> None:
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=injector"]
        made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(self._key), "-out", str(self._certificate)]
        subprocess.run(made, check=True, capture_output=True, timeout=60)

    def _configuration(self) -> Json:
        port = self._server.server_address[1]
        bundle = base64.b64encode(self._certificate.read_bytes()).decode()
        hook: dict[str, Any] = {
            "name": "injector.test.ddpjob.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/inject", "caBundle": bundle},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": 10,
        }
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
        return kind | {"metadata": {"name": self._path.rpartition("/")[2]}, "webhooks": [hook]}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = review["request"]
        response: Json = {"uid": request["uid"], "allowed": True}
        meta = request["object"]["metadata"]
        if "false" not in {(meta.get(part) or {}).get(KEY) for part in ("labels", "annotations")}:
            patch = json.dumps([{"op": "add", "path": "/spec/containers/-", "value": PROXY}])
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}
        kind = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        body = json.dumps(kind | {"response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""
