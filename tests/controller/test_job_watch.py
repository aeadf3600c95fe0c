"""The operator never stays deaf: what it watches disappears and returns, in one scope or in all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddpjob.api import names
from tests.controller.conftest import NEVER
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane, control_plane

pytestmark = pytest.mark.apiserver
RBAC_FILE = Path(__file__).parents[2] / "manifests" / "rbac.yaml"
OPERATOR_ROLE = ("ClusterRole", "ddpjob-operator")
CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ddpjobs.{names.GROUP}"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces"
KOPF_FINALIZER = "kopf.zalando.org/KopfFinalizerMarker"


@pytest.fixture(scope="module")
def own_plane() -> Iterator[ControlPlane]:
    """Run a control plane whose CRD and history the tests may remove."""
    with control_plane(audit=True) as plane:
        yield plane


def test_job_starts_at_once_after_the_crd_was_deleted_and_applied_again(own_plane: ControlPlane) -> None:
    own_plane.make_namespace("lost-crd")
    jobs = Jobs(own_plane, "lost-crd")
    with OperatorProcess(own_plane, "", sweep_interval_seconds=NEVER) as operator:
        jobs.submit("before")
        jobs.wait_for_pods(1, "before")
        own_plane.request("DELETE", CRD)
        eventually("the CRD is gone", lambda: _status(own_plane, CRD) == 404)
        eventually("the operator misses it", lambda: operator.get("/readyz")[0] == 503)
        assert operator.get("/healthz")[0] == 200
        own_plane.apply_crd()
        eventually("the operator is ready again", operator.is_ready)
        jobs.submit("after")
        jobs.wait_for_pods(1, "after", timeout=10.0)


def _status(plane: ControlPlane, path: str) -> int:
    try:
        plane.request("GET", path)
    except ApiError as error:
        return error.status
    return 200


@pytest.fixture
def lost(control_plane: ControlPlane, namespace: str) -> Jobs:
    """Return the jobs of a second namespace."""
    control_plane.make_namespace(f"{namespace}-lost")
    return Jobs(control_plane, f"{namespace}-lost")


def allow(plane: ControlPlane, account: str, namespace: str) -> None:
    """Give a service account of the namespace ``default`` the operator's rights in one namespace."""
    docs = yaml.safe_load_all(RBAC_FILE.read_text())
    (rules,) = (doc["rules"] for doc in docs if (doc["kind"], doc["metadata"]["name"]) == OPERATOR_ROLE)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    plane.request("POST", f"{ROLES}/{namespace}/roles", {"metadata": {"name": account}, "rules": rules})
    body = {"metadata": {"name": account}, "roleRef": role, "subjects": [subject]}
    plane.request("POST", f"{ROLES}/{namespace}/rolebindings", body)


def test_namespace_without_role_delays_no_other(control_plane: ControlPlane, jobs: Jobs, lost: Jobs) -> None:
    """The Role of one of two namespaces is missing, as after its deletion, and comes back."""
    account = f"operator-of-{jobs.namespace}"
    token = control_plane.service_account("default", account)
    allow(control_plane, account, jobs.namespace)
    jobs.submit()
    lost.submit()
    operator = OperatorProcess(
        control_plane,
        f"{lost.namespace},{jobs.namespace}",
        token=token,
        name=account,
        sweep_interval_seconds=5,
    )
    with operator:
        jobs.wait_for_pods(1)
        (service,) = jobs.owned("services")
        control_plane.request("DELETE", f"/api/v1/namespaces/{jobs.namespace}/services/{service}")
        eventually("the Service is repaired", lambda: jobs.owned("services") == [service])
        status, text = operator.get("/readyz")
        assert status == 200 and f"namespace {lost.namespace} is not served" in text
        assert operator.metric("ddpjob_namespace_served", namespace=lost.namespace) == 0
        assert operator.metric("ddpjob_namespace_served", namespace=jobs.namespace) == 1
        warnings = [line for line in operator.lines() if line["level"] == "warning" and lost.namespace in str(line)]
        assert warnings and "give the operator's service account the role" in warnings[0]["message"]
        assert len(warnings) <= 5, "one line for each kind, not one for each retry"
        allow(control_plane, account, lost.namespace)
        lost.wait_for_pods(1)
        eventually("both are served", lambda: operator.get("/readyz") == (200, "ok\n"))


def test_finalizer_of_kopf_on_a_job_is_left_alone(
    operator: OperatorProcess, control_plane: ControlPlane, jobs: Jobs
) -> None:
    """The operator has no right to patch a job, and kopf would try to remove a finalizer with its default name."""
    jobs.submit()
    jobs.wait_for_pods(1)
    finalizers = {"metadata": {"finalizers": [KOPF_FINALIZER]}}
    control_plane.request("PATCH", f"{jobs.path}/mnist", finalizers)
    jobs.settle()
    assert [write for write in jobs.writes(about="mnist") if write[:2] == ("patch", "ddpjobs")] == []
    assert jobs.get()["metadata"]["finalizers"] == [KOPF_FINALIZER]
