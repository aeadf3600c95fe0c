"""A mutating admission webhook that injects a sidecar into the pods of a namespace, as Istio's does."""

import base64
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

from ddpjob.api.objects import Json
from tests.controller.injection_server import InjectionServer
from tests.worlds.control_plane import ControlPlane

PROXY: Json = {"name": "istio-proxy", "image": "proxy:1"}
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class Injector:
    """Injects an ordinary container into each pod of a namespace, unless a label or an annotation says "false".

    Use as a context manager. The server runs on loopback, and the API server calls it by its URL.
    """

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        self._plane = plane
        self._namespace = namespace
        self._certificate, self._key = folder / "injector.crt", folder / "injector.key"
        self._path = f"{CONFIGURATIONS}/injector-{namespace}"

    def __enter__(self) -> Self:
        write_certificate(self._certificate, self._key, "IP:127.0.0.1")
        files = str(self._certificate), str(self._key)
        self._server = InjectionServer(("127.0.0.1", 0), *files, PROXY, obeys=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="injector", daemon=True)
        self._thread.start()
        client = {"url": f"https://127.0.0.1:{self._server.server_address[1]}/inject"}
        self._plane.request("POST", CONFIGURATIONS, configuration(self._namespace, client, self._certificate))
        return self

    def __exit__(self, *_: object) -> None:
        self._plane.request("DELETE", self._path)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def write_certificate(certificate: Path, key: Path, name: str) -> None:
    """Write a certificate for one name, such as ``IP:127.0.0.1``, that is its own authority."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=injector"]
    made += ["-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)


def configuration(namespace: str, client: Json, certificate: Path) -> Json:
    """Return the MutatingWebhookConfiguration for the pods of a namespace. ``client``: its URL or Service."""
    bundle = base64.b64encode(certificate.read_bytes()).decode()
    hook: dict[str, Any] = {
        "name": "injector.test.ddpjob.dev",
        "clientConfig": client | {"caBundle": bundle},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 10,
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
    return kind | {"metadata": {"name": f"injector-{namespace}"}, "webhooks": [hook]}
