"""PyTorchJob's operator, built from its Go module, as a process beside any API server.

It starts only with the ValidatingWebhookConfiguration of its name in the API server and with the webhook's certificate
on disk, which its Deployment mounts from a Secret that the operator fills. Here this program copies the certificate.
The API server cannot reach the webhook at the name of its Service, so jobs are not sent to it: in a cluster, each POST
of a PyTorchJob takes longer than here by one call of the webhook.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from subprocess import Popen
from types import TracebackType

import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.benchmarks.api_server import JobKind, job_of
from tests.kind.toolchain import Module, build_from, source_of
from tests.processes import end, eventually, free_port, spawn, tail
from tests.worlds.control_plane import ApiError, ControlPlane

VERSION = "v1.8.1"
_SOURCE = "github.com/kubeflow/training-operator"
MODULE = Module(
    "training-operator",
    {"training-operator": f"{_SOURCE}/cmd/training-operator.v1"},
    parent=Path(__file__).parent / "go",
)
RESOURCE = names.Resource("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")
_NAMESPACE = "kubeflow"
_SECRET = "training-operator-webhook-cert"
_WEBHOOK = "validator.training-operator.kubeflow.org"
# Fixed in the operator's source (pkg/cert).
_CERTIFICATES = Path("/tmp/k8s-webhook-server/serving-certs")
READY_SECONDS = 120.0


def pytorchjob_of(name: str, nodes: int) -> Json:
    """Return the PyTorchJob that gives the same pods as ``job_of``: one master, the others are workers."""
    spec = job_of(name, nodes)["spec"]
    container = {
        "name": "pytorch",
        "image": spec["image"],
        "args": spec["args"],
        "env": spec["env"],
        "resources": spec["resources"],
        "volumeMounts": [{"name": "checkpoint", "mountPath": "/checkpoints"}],
    }
    claim = {"name": "checkpoint", "persistentVolumeClaim": spec["checkpoint"]}
    template = {"spec": {"containers": [container], "volumes": [claim]}}
    replicas: Json = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, "restartPolicy": "Never", "template": template}
    return {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.kind,
        "metadata": {"name": name},
        "spec": {"nprocPerNode": str(spec["nprocPerNode"]), "pytorchReplicaSpecs": replicas},
    }


PYTORCHJOB = JobKind(RESOURCE, pytorchjob_of, "training.kubeflow.org/job-name")


def build() -> None:
    """Build the operator, or find it in the cache."""
    build_from(MODULE, "training-operator")


class PyTorchJobOperator:
    """Context manager that installs the CRD, starts the operator with its defaults, and stops it at the end."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="ddpjob-training-operator-")
        self._log = Path(self._folder.name) / "log"
        self._process: Popen[bytes] | None = None

    def __enter__(self) -> PyTorchJobOperator:
        program = build_from(MODULE, "training-operator")
        self._install()
        flags = (
            "--enable-scheme=pytorchjob",
            "--metrics-bind-address=0",
            f"--health-probe-bind-address=127.0.0.1:{self._port}",
            f"--webhook-server-port={free_port()}",
        )
        environment = {"PATH": os.environ["PATH"], "HOME": self._folder.name, "KUBECONFIG": str(self._kubeconfig())}
        self._process = spawn([program, *flags], self._log, environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            end(self._process)
        if kind is not None:
            print(tail(self._log), file=sys.stderr)
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Copy the certificate that the operator makes, and wait until its controllers and its webhook run."""
        eventually("the operator made its certificate", self._copy_certificate, timeout=READY_SECONDS)
        eventually("the operator of PyTorchJob is ready", self._is_ready, timeout=READY_SECONDS)

    def _kubeconfig(self) -> Path:
        return self._plane.kubeconfig()

    def _install(self) -> None:
        source = source_of(MODULE, _SOURCE) / "manifests" / "base"
        crd = yaml.safe_load((source / "crds" / "kubeflow.org_pytorchjobs.yaml").read_text())
        self._plane.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        eventually("the CRD of PyTorchJob is served", self._serves_jobs)
        self._plane.make_namespace(_NAMESPACE)
        secret = {"metadata": {"name": _SECRET}}
        self._plane.request("POST", f"/api/v1/namespaces/{_NAMESPACE}/secrets", secret)
        webhooks = yaml.safe_load((source / "webhook" / "manifests.yaml").read_text())
        webhooks["metadata"]["name"] = _WEBHOOK
        # The operator requires one webhook to put its certificate into; those of other kinds are never called here.
        others = [webhook for webhook in webhooks["webhooks"] if "pytorchjob" not in webhook["name"]]
        path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
        self._plane.request("POST", path, webhooks | {"webhooks": others[:1]})

    def _serves_jobs(self) -> bool:
        try:
            self._plane.request("GET", f"/{RESOURCE.path()}?limit=1")
        except ApiError:
            return False
        return True

    def _copy_certificate(self) -> bool:
        self._check_runs()
        data = self._plane.request("GET", f"/api/v1/namespaces/{_NAMESPACE}/secrets/{_SECRET}").get("data") or {}
        if "tls.crt" not in data:
            return False
        _CERTIFICATES.mkdir(parents=True, exist_ok=True)
        for name in ("tls.key", "tls.crt"):  # the operator waits for tls.crt
            (_CERTIFICATES / name).write_bytes(base64.b64decode(data[name]))
        return True

    def _is_ready(self) -> bool:
        self._check_runs()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _check_runs(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator of PyTorchJob ended with {self._process.returncode}")
