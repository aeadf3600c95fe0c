"""The script of `helm test`, run against a real API server with the operator's rights and health server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpjob_operator.controller.health import HealthServer
from tests.install.chart import CHART, NAMESPACE, Object, helm, of_kind, template
from tests.prepared import program
from tests.worlds.control_plane import ControlPlane

pytestmark = pytest.mark.apiserver
FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.fixture(scope="module")
def installed() -> Iterator[ControlPlane]:
    """Run a separate control plane with a release of the chart."""
    program("helm")
    with ControlPlane() as plane:
        flags = ("--kubeconfig", str(plane.kubeconfig()), "--namespace", NAMESPACE, "--create-namespace")
        done = helm("install", "ddpjob", str(CHART), *flags)
        assert done.returncode == 0, done.stderr
        plane.apply_crd()  # waits until it is served
        yield plane


def run_script(plane: ControlPlane, folder: Path, values: Object, *, ready: bool) -> "subprocess.CompletedProcess[str]":
    """Run the test pod's command with the operator's token and a health server that is ready or not."""
    pod, _ = of_kind(template(values), "Pod")
    container = pod["spec"]["containers"][0]
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/ddpjob-operator/token"
    token = plane.request(
        "POST", account, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    )
    (folder / "token").write_text(token["status"]["token"])
    (folder / "ca.crt").write_bytes(plane.ca_file.read_bytes())
    interpreter, flag, script = container["command"]
    assert (interpreter, flag) == ("python3", "-c")
    assert FOLDER in script and "+ 90" in script
    script = (
        script.replace(FOLDER, str(folder)).replace("+ 90", "+ (90 if READY else 2)").replace("READY", str(ready), 1)
    )
    verdict = (ready, "ok" if ready else "the watch of pods is not open")
    health = HealthServer(0, alive=lambda: (True, "ok"), ready=lambda: verdict, metrics=lambda: b"")
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    given |= {"READY_URL": f"http://127.0.0.1:{health.port}/readyz", "NO_PROXY": "127.0.0.1"}
    given |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(plane.port)}
    try:
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env={"PATH": os.environ["PATH"], **given}, text=True, capture_output=True, timeout=120, check=False
        )
    finally:
        health.close()


@pytest.mark.parametrize(
    "values", [{}, {"scope": "namespace", "namespaces": ["default"]}], ids=["cluster", "namespace"]
)
def test_helm_test_passes_with_a_ready_operator_and_served_jobs(
    installed: ControlPlane, tmp_path: Path, values: Object
) -> None:
    done = run_script(installed, tmp_path, values, ready=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "ok: API server serves DDPJobs: DDPJobList",
        "ok: operator is ready: ok",
    ]


def test_helm_test_fails_with_a_message_if_the_operator_is_not_ready(installed: ControlPlane, tmp_path: Path) -> None:
    done = run_script(installed, tmp_path, {}, ready=False)
    assert done.returncode == 1
    assert "error: operator is ready: HTTP Error 503" in done.stderr
    assert "the watch of pods is not open" in done.stderr
    listed, waits = done.stdout.splitlines()
    assert listed.startswith("ok: API server") and re.match(r"waiting up to [12] s: operator is ready: HTTP Err", waits)
