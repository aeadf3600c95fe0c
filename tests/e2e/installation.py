"""The operator, installed with Helm from charts/ddpjob, and its logs and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api.objects import Json
from tests.e2e.kubectl import Kubectl, until
from tests.kind.command import run
from tests.kind.toolchain import binary

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob"
RELEASE = "ddpjob"
NAMESPACE = "ddpjob-system"
DEPLOYMENT = "deployment/ddpjob-operator"
PODS = "app.kubernetes.io/name=ddpjob,app.kubernetes.io/component=operator"

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """One release of the chart."""

    kubectl: Kubectl
    """kubectl for the release's namespace."""

    @classmethod
    def of(cls, kubeconfig: Path) -> Installation:
        return cls(Kubectl(kubeconfig, NAMESPACE))

    def helm(self, *arguments: str, timeout: float = 240.0) -> str:
        """Run one helm command in the release's namespace and return its output."""
        head: list[str | Path] = [binary("helm"), "--kubeconfig", self.kubectl.kubeconfig, "--namespace", NAMESPACE]
        return run([*head, *arguments], timeout=timeout).stdout

    def install(self, image: str, *, progress_seconds: int) -> None:
        """Install or upgrade the release."""
        repository, _, tag = image.rpartition(":")
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "image.pullPolicy": "Never",
            "operator.progressIntervalSeconds": str(progress_seconds),
        }
        settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        self.helm("upgrade", "--install", RELEASE, str(CHART), "--create-namespace", *settings, timeout=120)

    def wait_until_ready(self) -> None:
        """Wait until every pod of the Deployment has the present template and is ready, and those before have ended."""
        self.kubectl("rollout", "status", DEPLOYMENT, "--timeout=180s", timeout=210)
        selected = ("pods", "--selector", PODS)
        until("the old pods have ended", lambda: len(self.kubectl.objects(*selected)) == len(self.pods()), seconds=60)

    def restart(self) -> None:
        """Replace the pods, for example because another image was loaded under the same tag."""
        self.kubectl("rollout", "restart", DEPLOYMENT)
        self.wait_until_ready()

    def uninstall(self) -> None:
        """Uninstall the release. Its keep policy leaves the CRD."""
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout=120s", timeout=150)

    def pods(self) -> list[Json]:
        """Return the operator's pods without those that are being deleted."""
        found = self.kubectl.objects("pods", "--selector", PODS)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the operator without a grace period, and start a new one at the end."""
        self.kubectl("scale", DEPLOYMENT, "--replicas=0")
        self.kubectl("delete", "pod", "--selector", PODS, "--grace-period=0", "--force")
        until("no operator", lambda: not self.pods(), seconds=60)
        try:
            yield
        finally:
            self.kubectl("scale", DEPLOYMENT, "--replicas=1")
            self.wait_until_ready()

    def log(self) -> list[Json]:
        """Return the lines of the operator's log, oldest first."""
        lines = self.kubectl("logs", DEPLOYMENT, "--tail=-1").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return the samples of /metrics by name and labels, read through the API server."""
        pod = self.pods()[0]["metadata"]["name"]
        text = self.kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8080/proxy/metrics")
        return {(m["name"], m["labels"] or ""): float(m["value"]) for m in _SAMPLE.finditer(text)}

    def refused_requests(self) -> list[str]:
        """Return the requests that the API server refused with 403 since the operator started.

        The quota of a test refuses creates of pods. Without the right to create them no test would pass.
        """
        counted, of_quota = "ddpjob_api_request_duration_seconds_count", 'verb="create"'
        refused = [labels for (name, labels) in self.metrics() if name == counted and 'code="403"' in labels]
        texts = [(line, f"{line.get('message')} {line.get('exception')}".lower()) for line in self.log()]
        by_log = [json.dumps(line) for line, text in texts if "forbidden" in text and "exceeded quota" not in text]
        return [labels for labels in refused if of_quota not in labels] + by_log
