"""Kueue's own manager as a process beside a control plane, with its webhooks, from its Go module."""

import base64
import contextlib
import json
import threading
from pathlib import Path
from typing import Any, Self

import yaml

from ddpjob.api.objects import Json
from tests.kind.toolchain import MODULES, source_of
from tests.prepared import program
from tests.processes import end, eventually, free_port, spawn, tail
from tests.worlds.control_plane import ApiError, ControlPlane

NAMESPACE = "kueue-system"
SERVICE = "kueue-webhook-service"
SECRET = "kueue-webhook-server-cert"
START_SECONDS = 240.0
_MODULE = next(module for module in MODULES if module.folder == "kueue")
_CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")
"""Kinds into whose definition the manager writes its CA."""
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


class KueueManager:
    """Runs the manager; the context manager stops it. settings: of its configuration."""

    def __init__(self, plane: ControlPlane, **settings: Any) -> None:
        self._plane = plane
        self._folder = plane.folder / "kueue"
        self._certificates = self._folder / "certificates"
        self._port, self._health = free_port(), free_port()
        self._settings = settings
        self._log = self._folder / "kueue.log"
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        manager = program("kueue")
        self._certificates.mkdir(parents=True)
        self._install(source_of(_MODULE, "sigs.k8s.io/kueue") / "config" / "components")
        config = self._folder / "config.yaml"
        config.write_text(json.dumps(self._config()))
        environment = {"KUBECONFIG": str(self._plane.kubeconfig()), "NO_PROXY": "127.0.0.1", "HOME": str(self._folder)}
        command = [manager, f"--config={config}", "--feature-gates=VisibilityOnDemand=false", "--zap-log-level=2"]
        self._process = spawn(command, self._log, environment)
        self._mounts = threading.Thread(target=self._mount_certificates, daemon=True)
        self._mounts.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._mounts.join()
        end(self._process)

    def text(self) -> str:
        """Return the end of its log."""
        return tail(self._log, lines=60)

    def create(self, api: str, plural: str, body: Json, *, namespace: str = "") -> None:
        """Create an object of Kueue, as soon as the webhook for it answers."""
        where = f"namespaces/{namespace}/" if namespace else ""

        def created() -> bool:
            assert self._process.poll() is None, self.text()
            try:
                self._plane.request("POST", f"/apis/{api}/{where}{plural}", {"apiVersion": api} | body)
            except ApiError as error:
                if error.status not in (404, 500):  # not served yet, or the webhook does not answer yet
                    raise
                return False
            return True

        eventually(f"{plural} are accepted; {self.text()}", created, timeout=START_SECONDS, interval=0.2)

    def _config(self) -> Json:
        certificates = {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET}
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": NAMESPACE,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self._port, "certDir": str(self._certificates)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": certificates,
            "integrations": {"frameworks": ["batch/job"]},
            **self._settings,
        }

    def _install(self, source: Path) -> None:
        """Apply the definitions and webhooks of the module, for a manager on this machine.

        The API server reaches it through a Service of the type ExternalName.
        """
        plane, core = self._plane, f"/api/v1/namespaces/{NAMESPACE}"
        plane.make_namespace(NAMESPACE)
        plane.request("POST", f"{core}/secrets", {"metadata": {"name": SECRET}})
        service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": self._port}]}
        plane.request("POST", f"{core}/services", {"metadata": {"name": SERVICE}, "spec": service})
        client = {"service": {"namespace": NAMESPACE, "name": SERVICE, "port": self._port}}
        for file in sorted((source / "crd" / "bases").glob("*.yaml")):
            crd = _read(file)[0]
            if crd["spec"]["names"]["plural"] in _CONVERTED:
                reached = {"service": client["service"] | {"path": "/convert"}}
                webhook = {"clientConfig": reached, "conversionReviewVersions": ["v1"]}
                crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
            plane.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        for configuration in _read(source / "webhook" / "manifests.yaml"):
            own = [hook for hook in configuration["webhooks"] if hook["rules"][0]["apiGroups"] == ["kueue.x-k8s.io"]]
            for hook in own:
                hook["clientConfig"]["service"] |= client["service"]
            kind = configuration["kind"].removesuffix("WebhookConfiguration").lower()
            body = configuration | {"metadata": {"name": f"kueue-{kind}-webhook-configuration"}, "webhooks": own}
            plane.request("POST", f"{_ADMISSION}/{kind}webhookconfigurations", body)

    def _mount_certificates(self) -> None:
        """Write the Secret of the manager to files, as the kubelet does for its pod."""
        while not self._stopped.wait(0.2):
            with contextlib.suppress(ApiError, OSError):
                secret = self._plane.request("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET}")
                for name, value in (secret.get("data") or {}).items():
                    content, file = base64.b64decode(value), self._certificates / name
                    if not file.exists() or file.read_bytes() != content:
                        file.write_bytes(content)


def _read(file: Path) -> list[Json]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the definition of a Workload has 20,000 lines
    return [part for part in yaml.load_all(file.read_text(encoding="utf-8"), Loader=loader) if part]
