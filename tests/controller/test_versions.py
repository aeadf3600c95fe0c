"""The operator under a CRD whose schema refuses its status: it touches no pod, and says what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.controller.conftest import NEVER
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import CRD_FILE, ControlPlane

pytestmark = pytest.mark.apiserver


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """Run a control plane for this module: a CRD belongs to the whole cluster."""
    with ControlPlane(audit=True) as plane:
        plane.apply_crd()
        plane.make_namespace("mix")
        yield Jobs(plane, "mix")


def strict_crd(folder: Path) -> Path:
    """Write a CRD whose schema of the status refuses every field that it does not declare; it lacks one."""
    crd = yaml.safe_load(CRD_FILE.read_text(encoding="utf-8"))
    for version in crd["spec"]["versions"]:
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        del status["properties"]["currentAttempt"]
        status.pop("x-kubernetes-preserve-unknown-fields")
    file = folder / "crd.yaml"
    file.write_text(yaml.safe_dump(crd))
    return file


def wait_for_refusals(jobs: Jobs, name: str) -> None:
    """Wait until the API server has refused three further patches of the job's status."""

    def refusals() -> int:
        writes = jobs.writes(about=name)
        return sum(resource == "ddpjobs/status" and code in (400, 422) for _, resource, _, code in writes)

    goal = refusals() + 3
    eventually("the operator tries again", lambda: refusals() >= goal)


def test_operator_acts_only_on_recorded_decisions_and_reports_a_crd_that_refuses_them(
    jobs: Jobs, tmp_path: Path
) -> None:
    with OperatorProcess(jobs.plane, jobs.namespace, sweep_interval_seconds=NEVER) as operator:
        jobs.submit(numNodes=2)
        pods = jobs.wait_for_pods(2)
        for pod in pods:
            jobs.run(pod)
        jobs.wait_for("Running", nodesReady="2/2")
        jobs.settle()
        jobs.plane.apply_crd(strict_crd(tmp_path))
        jobs.end(pods[0], 1)
        wait_for_refusals(jobs, "mnist")
        jobs.submit("later")
        wait_for_refusals(jobs, "later")
        assert jobs.pods("later") == []
        writes = [(verb, code) for verb, kind, _, code in jobs.writes(about="mnist") if kind.startswith("pods")]
        assert writes == [("create", 201)] * 2, "nothing was done to the pods"
        assert (jobs.status()["attempt"], jobs.status().get("failures")) == (1, None)
        why = eventually("not ready", lambda: answer[1] if (answer := operator.get("/readyz"))[0] == 503 else "")
        assert "the CustomResourceDefinition ddpjobs.ddpjob.dev refuses status.currentAttempt" in why
        assert "apply manifests/crd.yaml of release " in why
        events = [event for event in jobs.objects("events") if event["reason"] == "StatusRefused"]
        assert {event["involvedObject"]["name"] for event in events} == {"mnist", "later"}
        assert operator.get("/healthz")[0] == 200

        jobs.plane.apply_crd()
        # The delay after refused writes is up to 30 s.
        jobs.wait_for_pods(2, attempt=2, timeout=240)
        jobs.wait_for_pods(1, "later", timeout=240)
        assert jobs.status()["restarts"] == 1
        eventually("it is ready", operator.is_ready)
