"""Two releases: the operator of each under the CRD of the other, and upgrades and rollbacks with a running job.

No mix touches a pod. ``tests/versions`` has the release before this one.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from tests.controller.conftest import NEVER
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import CRD_FILE, ControlPlane

pytestmark = pytest.mark.apiserver
VERSIONS = Path(__file__).parents[1] / "versions"
TEMPLATE = {"spec": {"dnsPolicy": "Default"}}  # of which specHash is a digest

_numbers = count(1)


@dataclass(frozen=True)
class Release:
    """crd: the file of its CustomResourceDefinition. package: the folder of its operator; None is this working tree."""

    name: str
    crd: Path
    package: Path | None


class Mix:
    """The jobs of one namespace, the CRD that the API server serves, and operators of both releases."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace
        self.jobs = Jobs(plane, namespace)

    def serve(self, release: Release) -> None:
        """Apply the CRD of a release and wait until the API server uses it."""
        self.plane.apply_crd(release.crd)

    def operator(self, release: Release) -> OperatorProcess:
        return OperatorProcess(
            self.plane,
            self.namespace,
            name=f"operator-{release.name}",
            package=release.package,
            sweep_interval_seconds=NEVER,
        )

    @contextmanager
    def unready_operator(self, release: Release) -> Iterator[OperatorProcess]:
        """Run an operator without waiting until it is ready, which it is not before it can write every status."""
        operator = self.operator(release)
        operator.start(wait=False)
        try:
            yield operator
        finally:
            assert operator.stop() == 0

    def run_job(self, name: str = "mnist", **spec: Any) -> list[Json]:
        """Submit a job of two nodes, run its pods and return them."""
        self.jobs.submit(name, numNodes=2, template=TEMPLATE, **spec)
        pods = self.jobs.wait_for_pods(2, name)
        for pod in pods:
            self.jobs.run(pod)
        self.jobs.wait_for("Running", name, nodesReady="2/2")
        return pods

    def end(self, pod: Json, code: int = 0) -> None:
        self.jobs.end(pod, code)

    def wait_for_succeeded(self, number: int, name: str = "mnist") -> Json:
        """Wait until the status counts this number of succeeded pods."""
        return eventually(
            f"{number} pods of {name} succeeded",
            lambda: status if (status := self.jobs.status(name)).get("nodes", {}).get("succeeded") == number else None,
        )

    def wait_for_refusals(self, name: str = "mnist", times: int = 3) -> None:
        """Wait until the API server has refused this number of further patches of the job's status."""
        goal = len(self._refusals(name)) + times
        eventually("the operator tries again", lambda: len(self._refusals(name)) >= goal)

    def _refusals(self, name: str) -> list[int]:
        writes = self.jobs.writes(about=name)
        return [code for _, resource, _, code in writes if resource == "ddpjobs/status" and code in (400, 422)]

    def assert_untouched(self, pods: list[Json], name: str = "mnist") -> None:
        """Check that the job has exactly these pods, and that no operator wrote to them after it had created them."""
        assert [uid(pod) for pod in self.jobs.pods(name)] == [uid(pod) for pod in pods]
        assert not any("deletionTimestamp" in pod["metadata"] for pod in self.jobs.pods(name))
        writes = [(verb, code) for verb, kind, _, code in self.jobs.writes(about=name) if kind.startswith("pods")]
        assert writes == [("create", 201)] * len(pods)

    def events(self, reason: str) -> list[Json]:
        return [event for event in self.jobs.objects("events") if event["reason"] == reason]


def uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """Run a control plane for this module: a CRD belongs to the whole cluster."""
    with ControlPlane(audit=True) as plane:
        yield plane


@pytest.fixture
def mix(plane: ControlPlane) -> Mix:
    namespace = f"mix-{next(_numbers)}"
    plane.make_namespace(namespace)
    return Mix(plane, namespace)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Return the release before this one, with its wheel unpacked."""
    folder = tmp_path_factory.mktemp("release")
    (wheel,) = VERSIONS.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return Release("before", VERSIONS / "crd.yaml", folder)


@pytest.fixture(scope="module")
def this() -> Release:
    return Release("this", CRD_FILE, None)


@pytest.fixture(scope="module")
def strict() -> Release:
    """Return a CRD whose schema of the status refuses every field that it does not declare."""
    return Release("strict", VERSIONS / "strict-crd.yaml", None)


def test_operators_of_both_releases_run_their_own_code(mix: Mix, before: Release, this: Release) -> None:
    code_of = {"ddpjob": before.package, "ddpjob_operator": CRD_FILE.parents[1] / "operator"}
    for release, (package, folder) in zip((before, this), code_of.items(), strict=True):
        code = f"import {package}.controller.main as main; print(main.__file__)"
        environment = mix.operator(release).environment
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()) == Path(str(folder), package, "controller/main.py")


@pytest.mark.soak
def test_operator_before_runs_a_job_under_the_crd_of_this_release(mix: Mix, before: Release, this: Release) -> None:
    mix.serve(this)
    with mix.operator(before) as operator:
        pods = mix.run_job()
        mix.end(pods[1])
        mix.wait_for_succeeded(1)
        mix.end(pods[0])
        mix.jobs.wait_for("Succeeded")
        assert operator.is_ready()
    mix.assert_untouched(pods)


@pytest.mark.soak
def test_operator_before_restarts_a_job_under_the_crd_of_this_release(mix: Mix, before: Release, this: Release) -> None:
    mix.serve(this)
    with mix.operator(before):
        pods = mix.run_job()
        mix.end(pods[1], 1)
        mix.jobs.wait_for_pods(2, attempt=2)
        assert mix.jobs.status()["restarts"] == 1


def test_upgrade_of_crd_then_operator_touches_no_pod(mix: Mix, before: Release, this: Release) -> None:
    mix.serve(before)
    with mix.operator(before):
        pods = mix.run_job()
        fails = mix.run_job("fails")
        mix.serve(this)
        mix.end(pods[1])
        mix.wait_for_succeeded(1)
        old_hash = mix.jobs.status()["specHash"]
    mix.end(pods[0])
    with mix.operator(this) as operator:
        mix.jobs.wait_for("Succeeded")
        mix.assert_untouched(pods)
        eventually("the digest is replaced", lambda: mix.jobs.status("fails")["specHash"] != old_hash)
        mix.jobs.wait_for("Running", "fails", nodesReady="2/2")
        mix.assert_untouched(fails, "fails")
        mix.end(fails[0], 1)
        mix.jobs.wait_for_pods(2, "fails", attempt=2)
        assert mix.jobs.status("fails")["restarts"] == 1
        assert operator.is_ready()


@pytest.mark.soak
def test_operator_of_this_release_runs_and_restarts_a_job_under_the_crd_before(
    mix: Mix, before: Release, this: Release
) -> None:
    mix.serve(before)
    with mix.operator(this) as operator:
        pods = mix.run_job()
        mix.assert_untouched(pods)
        mix.end(pods[1], 1)
        again = mix.jobs.wait_for_pods(2, attempt=2)
        for pod in again:
            mix.end(pod)
        mix.jobs.wait_for("Succeeded")
        assert mix.jobs.status()["failures"][0]["next"], "the status is complete"
        assert operator.is_ready()


@pytest.mark.soak
def test_operator_reports_a_crd_that_refuses_its_status_and_touches_no_pod(
    mix: Mix, strict: Release, this: Release
) -> None:
    mix.serve(this)
    with mix.operator(this):
        pods = mix.run_job()
    mix.serve(strict)
    with mix.unready_operator(this) as operator:
        mix.end(pods[1])
        mix.wait_for_refusals()
        why = eventually("not ready", lambda: answer[1] if (answer := operator.get("/readyz"))[0] == 503 else "")
        assert "the CustomResourceDefinition ddpjobs.ddpjob.dev refuses status.currentAttempt" in why
        assert f" of {mix.namespace}/mnist: apply manifests/crd.yaml of release " in why
        (event,) = eventually("the event", lambda: mix.events("StatusRefused"))
        assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "mnist")
        assert "status.currentAttempt" in event["message"]
        assert mix.jobs.status()["nodes"]["succeeded"] == 0, "nothing was recorded"
        mix.assert_untouched(pods)
        assert operator.get("/healthz")[0] == 200

        mix.serve(this)
        mix.wait_for_succeeded(1)
        eventually("it is ready", operator.is_ready)
        mix.end(pods[0])
        mix.jobs.wait_for("Succeeded")
        mix.assert_untouched(pods)


@pytest.mark.soak
def test_new_job_starts_under_such_a_crd_only_after_its_upgrade(mix: Mix, strict: Release, this: Release) -> None:
    mix.serve(strict)
    with mix.unready_operator(this):
        mix.jobs.submit()
        mix.wait_for_refusals()
        assert mix.jobs.pods() == []
        assert mix.jobs.status() == {}
        mix.serve(this)
        mix.jobs.wait_for_pods(1)


@pytest.mark.soak
def test_rollback_of_the_operator_and_a_second_upgrade_touch_no_pod(mix: Mix, before: Release, this: Release) -> None:
    mix.serve(this)
    with mix.operator(this):
        pods = mix.run_job()
        other = mix.run_job("other")
    with mix.operator(before):
        mix.end(pods[1])
        mix.wait_for_succeeded(1)
        mix.end(pods[0])
        mix.jobs.wait_for("Succeeded")
        mix.assert_untouched(pods)
    with mix.operator(this):
        mix.end(other[1])
        mix.wait_for_succeeded(1, "other")
        mix.assert_untouched(other, "other")
        mix.end(other[0])
        mix.jobs.wait_for("Succeeded", "other")
        mix.assert_untouched(other, "other")


def test_operator_acts_under_such_a_crd_only_on_recorded_decisions(mix: Mix, strict: Release, this: Release) -> None:
    mix.serve(this)
    with mix.operator(this):
        pods = mix.run_job()
    mix.serve(strict)
    with mix.unready_operator(this):
        mix.end(pods[0], 1)
        mix.wait_for_refusals()
        mix.jobs.submit("later")
        mix.wait_for_refusals("later")
        mix.assert_untouched(pods)
        assert mix.jobs.pods("later") == []
        assert mix.jobs.status()["attempt"] == 1

        mix.serve(this)
        # The delay after refused writes is up to 30 s.
        mix.jobs.wait_for_pods(2, attempt=2, timeout=240)
        mix.jobs.wait_for_pods(1, "later", timeout=240)
        assert mix.jobs.status()["restarts"] == 1
