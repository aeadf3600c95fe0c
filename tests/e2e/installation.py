"""The operator as `helm install` of charts/ddpjob makes it, and what it says of itself: logs and metrics."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.kubectl import Json, Kubectl, until
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
    """One release of the chart in its own namespace."""

    kubectl: Kubectl
    """For the release's namespace."""

    @classmethod
    def of(cls, kubeconfig: Path) -> Installation:
        return cls(Kubectl(kubeconfig, NAMESPACE))

    def helm(self, *words: str, timeout: float = 240.0) -> str:
        """One helm command on the release's namespace."""
        head: list[str | Path] = [binary("helm"), "--kubeconfig", self.kubectl.kubeconfig, "--namespace", NAMESPACE]
        return run([*head, *words], timeout=timeout).stdout

    def install(self, image: str, *, progress_seconds: int) -> None:
        """Install or upgrade, and wait until the operator is ready."""
        repository, _, tag = image.rpartition(":")
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "image.pullPolicy": "Never",
            "operator.progressIntervalSeconds": str(progress_seconds),
        }
        settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self.helm("upgrade", "--install", RELEASE, str(CHART), "--create-namespace", *settings, timeout=120)

    def wait_until_ready(self) -> None:
        """Every pod of the Deployment is of the present template, and ready."""
        self.kubectl("rollout", "status", DEPLOYMENT, "--timeout=90s", timeout=120)

    def restart(self) -> None:
        """New pods, for instance because an image of the same tag was loaded anew."""
        self.kubectl("rollout", "restart", DEPLOYMENT)
        self.wait_until_ready()

    def uninstall(self) -> None:
        """Remove the release; its keep policy leaves the CRD."""
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout=120s", timeout=150)

    def pods(self) -> list[Json]:
        """The operator's pods that are not on their way out."""
        found = self.kubectl.objects("pods", "--selector", PODS)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def kill(self) -> None:
        """Kill the operator without notice; its Deployment makes a new pod."""
        before = {pod["metadata"]["uid"] for pod in self.pods()}
        self.kubectl("delete", "pod", "--selector", PODS, "--grace-period=0", "--force")
        until("a new operator pod", lambda: {p["metadata"]["uid"] for p in self.pods()} - before, seconds=60)
        self.wait_until_ready()

    def log(self) -> list[Json]:
        """Lines of the operator's log, oldest first."""
        lines = self.kubectl("logs", DEPLOYMENT, "--tail=-1").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def metrics(self) -> dict[tuple[str, str], float]:
        """Samples of /metrics by name and labels, read through the API server."""
        pod = self.pods()[0]["metadata"]["name"]
        text = self.kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8080/proxy/metrics")
        return {(m["name"], m["labels"] or ""): float(m["value"]) for m in _SAMPLE.finditer(text)}

    def activity(self) -> dict[str, float]:
        """Requests to the API server, LISTs apart, and questions to trainers since the operator started."""
        counted = {"ddpjob_api_request_duration_seconds_count": "requests", "ddpjob_progress_polls_total": "polls"}
        totals = dict.fromkeys(counted.values(), 0.0)
        for (name, labels), number in self.metrics().items():
            if name in counted and 'verb="list"' not in labels:
                totals[counted[name]] += number
        return totals

    def refused_requests(self) -> list[str]:
        """Requests that the API server refused for want of a right, since the operator started."""
        counted = "ddpjob_api_request_duration_seconds_count"
        by_metrics = [labels for (name, labels) in self.metrics() if name == counted and 'code="403"' in labels]
        said = [line for line in self.log() if re.search(r"\b403\b|[Ff]orbidden", json.dumps(line))]
        return by_metrics + [json.dumps(line) for line in said]
