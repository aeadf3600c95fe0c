"""The operator beside a webhook that injects a sidecar into every pod, on a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.builders import ended, running
from tests.controller.injection_server import KEY
from tests.controller.injector import Injector
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane

pytestmark = pytest.mark.apiserver
INJECT = {"metadata": {"annotations": {KEY: "true"}}}


@pytest.fixture(autouse=True)
def injector(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[None]:
    with Injector(control_plane, namespace, tmp_path):
        yield


def containers(pod: Json) -> list[str]:
    return [container["name"] for container in pod["spec"]["containers"]]


def report(jobs: Jobs, pod: Json, trainer: Json) -> None:
    """Report the state of the trainer as a kubelet does while the sidecar runs."""
    states = [*trainer["containerStatuses"], {"name": "istio-proxy", "state": {"running": {}}}]
    states = [{"image": "", "imageID": "", "ready": True, "restartCount": 0} | state for state in states]
    status = {"phase": "Running", "containerStatuses": states}
    jobs.plane.request("PATCH", f"{jobs.object_path(pod)}/status", {"status": status})


def stopped(jobs: Jobs, attempt: int) -> list[Json] | None:
    pods = jobs.pods(attempt=attempt)
    return pods if all(pod["spec"].get("activeDeadlineSeconds") == 1 for pod in pods) else None


def test_pods_ask_for_no_sidecar_by_default(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit()
    (pod,) = jobs.wait_for_pods(1)
    assert containers(pod) == ["trainer"]


def test_pods_with_a_sidecar_keep_their_logs_and_hold_no_resources(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit(numNodes=2, template=INJECT)
    first, second = jobs.wait_for_pods(2)
    assert containers(first) == ["trainer", "istio-proxy"]
    for pod in (first, second):
        report(jobs, pod, running())
    jobs.wait_for("Running", nodesReady="2/2")
    report(jobs, second, ended(139, message="bad batch"))
    for pod in jobs.wait_for_pods(2, attempt=2):
        report(jobs, pod, ended(0))
    status = jobs.wait_for("Succeeded")
    (failure,) = status["failures"]
    assert failure["logTail"] == "bad batch" and failure["pod"] in failure["next"]
    kept = eventually("the sidecars of both attempts are stopped", lambda: stopped(jobs, 1) and stopped(jobs, 2))
    assert len(kept) == 2 and "deletionTimestamp" not in str(jobs.pods())
    assert [pod["metadata"]["name"] for pod in jobs.pods(attempt=1)] == [failure["pod"]]
