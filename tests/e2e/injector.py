"""A mutating admission webhook that injects a sidecar into the pods of a namespace, as Istio's does."""

import base64
import subprocess
from pathlib import Path
from typing import Any

from ddpjob.api.objects import Json


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
