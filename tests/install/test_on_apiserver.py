"""Chart, manifests and examples on a real API server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.install.chart import CHART, NAMESPACE, ROOT, Object, helm, of_kind, template
from tests.install.test_examples import EXAMPLES, JOBS
from tests.install.test_rights import OPERATOR
from tests.prepared import program
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane

pytestmark = pytest.mark.apiserver
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ddpjobs.ddpjob.dev"
JOBS_PATH = "/apis/ddpjob.dev/v1alpha1/namespaces/default/ddpjobs"


@pytest.fixture
def empty_cluster() -> Iterator[ControlPlane]:
    """Run a separate control plane, because the test installs and removes the CRD."""
    program("helm")
    plane = ControlPlane()
    plane.api_flags = (  # as in Kubernetes 1.36
        "--feature-gates=MutatingAdmissionPolicy=true",
        "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
    )
    with plane:
        yield plane


def run_helm(plane: ControlPlane, *arguments: str) -> str:
    done = helm("--kubeconfig", str(plane.kubeconfig()), "--namespace", NAMESPACE, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def allowed(plane: ControlPlane, namespace: str, triple: tuple[str, str, str]) -> bool:
    """Return whether RBAC grants the operator's account one (group, resource, verb) in a namespace."""
    group, resource, verb = triple
    resource, _, subresource = resource.partition("/")
    attributes = {
        "namespace": namespace,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
    }
    account = f"system:serviceaccount:{NAMESPACE}:ddpjob-operator"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "groups": ["system:serviceaccounts"], "resourceAttributes": attributes},
    }
    answer = plane.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def exists(plane: ControlPlane, path: str) -> bool:
    try:
        plane.request("GET", path)
    except ApiError as error:
        assert error.status == 404, error
        return False
    return True


@pytest.mark.parametrize("name", [*JOBS, "shared-volume.yaml"])
def test_api_server_accepts_every_example(control_plane: ControlPlane, namespace: str, name: str) -> None:
    arguments = ("--namespace", namespace, "--server-side", "--dry-run=server", "--validate=strict")
    done = control_plane.kubectl("apply", *arguments, "-f", str(EXAMPLES / name), check=False)
    assert done.returncode == 0, done.stderr


def test_kubectl_table_and_wait_are_as_documented(control_plane: ControlPlane, namespace: str) -> None:
    def kubectl(*arguments: str) -> str:
        return control_plane.kubectl("--namespace", namespace, *arguments).stdout

    kubectl("apply", "-f", str(EXAMPLES / "mnist-cpu.yaml"))
    now = "2026-03-01T12:00:00Z"
    condition = {"status": "True", "message": "", "lastTransitionTime": now}
    status = {
        "state": "Failed",
        "nodesReady": "2/2",
        "restarts": 1,
        "world": {"numNodes": 2, "nprocPerNode": 2, "worldSize": 4, "masterAddress": "host:29500"},
        "progress": {"display": "63% 300/470", "loss": "0.0912"},
        "conditions": [
            {"type": "Running", "reason": "MaxRestartsExceeded", **condition, "status": "False"},
            {"type": "Finished", "reason": "MaxRestartsExceeded", **condition},
        ],
    }
    path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs/mnist-cpu/status"
    control_plane.request("PATCH", path, {"status": status})

    header, row = kubectl("get", "ddp", "-o", "wide").splitlines()
    documented = (ROOT / "docs" / "reference" / "status.md").read_text(encoding="utf-8")
    assert header.split() == next(line for line in documented.splitlines() if line.startswith("NAME")).split()
    for cell in ("mnist-cpu", "Failed", "2/2", "63% 300/470", "0.0912", "4", "MaxRestartsExceeded"):
        assert cell in row
    assert "condition met" in kubectl("wait", "ddp/mnist-cpu", "--for=condition=Finished", "--timeout=10s")


def test_helm_uninstall_keeps_jobs_and_the_next_release_finds_them(empty_cluster: ControlPlane) -> None:
    plane = empty_cluster
    run_helm(plane, "install", "ddpjob", str(CHART), "--create-namespace")
    assert plane.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/ddpjob-operator")
    plane.apply_crd()  # waits until it is served
    job = yaml.safe_load((EXAMPLES / "mnist-cpu.yaml").read_text(encoding="utf-8"))
    plane.request("POST", f"{JOBS_PATH}?fieldValidation=Strict", job)

    run_helm(plane, "upgrade", "ddpjob", str(CHART), "--set", "operator.logLevel=debug")
    run_helm(plane, "uninstall", "ddpjob")

    assert not exists(plane, f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/ddpjob-operator")
    assert not exists(plane, "/apis/rbac.authorization.k8s.io/v1/clusterroles/ddpjob-operator")
    assert exists(plane, f"{JOBS_PATH}/mnist-cpu")
    assert exists(plane, "/apis/rbac.authorization.k8s.io/v1/clusterroles/ddpjob-edit")
    run_helm(plane, "install", "ddpjob", str(CHART))
    assert exists(plane, f"{JOBS_PATH}/mnist-cpu")


def test_namespace_scope_grants_nothing_in_other_namespaces(empty_cluster: ControlPlane) -> None:
    plane = empty_cluster
    for name in ("team-a", "team-b"):
        plane.make_namespace(name)
    scope = ("--set", "scope=namespace", "--set-json", 'namespaces=["team-a"]')
    run_helm(plane, "install", "ddpjob", str(CHART), "--create-namespace", *scope)
    assert all(allowed(plane, "team-a", triple) for triple in OPERATOR)
    assert not any(allowed(plane, "team-b", triple) for triple in OPERATOR)


def test_job_gets_the_defaults_of_its_namespace_where_its_spec_has_none(empty_cluster: ControlPlane) -> None:
    plane, given = empty_cluster, {"launcher": "Injected", "ttlSecondsAfterFinished": 3600, "maxRestarts": 5}
    for name in ("team-a", "team-b"):
        plane.make_namespace(name)
    defaults = ("--set-json", f"defaults={json.dumps({'team-a': given})}")
    run_helm(plane, "install", "ddpjob", str(CHART), "--create-namespace", *defaults)
    plane.apply_crd()  # waits until it is served

    def created(namespace: str, **spec: Any) -> Object:
        job = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": "job"}}
        path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs?dryRun=All"
        stored: Object = plane.request("POST", path, job | {"spec": {"image": "trainer:1", **spec}})["spec"]
        return {name: stored.get(name) for name in given} | {"maxRestarts": stored["restartPolicy"].get("maxRestarts")}

    def applied() -> bool:
        try:
            return created("team-a") == given
        except ApiError as error:
            assert error.status == 503, error  # the admission has not seen the CRD yet
            return False

    eventually("the API server knows the policy", applied)
    assert created("team-b") == dict.fromkeys(given)
    own = created("team-a", ttlSecondsAfterFinished=7, restartPolicy={"maxRestarts": 0})
    assert own == {"launcher": "Injected", "ttlSecondsAfterFinished": 7, "maxRestarts": 0}


def test_plain_manifests_install_and_grant_exactly_the_listed_rights(empty_cluster: ControlPlane) -> None:
    plane = empty_cluster
    # Server-side apply needs one pass: client-side apply may send objects before their namespace is ready.
    plane.kubectl("apply", "--server-side", "-k", str(ROOT / "manifests"))
    assert exists(plane, CRD_PATH)
    assert exists(plane, f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/ddpjob-operator")
    assert all(allowed(plane, "any-namespace", triple) for triple in OPERATOR)
    denied = [
        ("", "secrets", "get"),
        ("", "pods", "update"),
        ("", "persistentvolumeclaims", "delete"),
        ("", "services", "delete"),
        ("ddpjob.dev", "ddpjobs", "update"),
        ("ddpjob.dev", "ddpjobs/status", "update"),
        ("", "pods/exec", "create"),
    ]
    assert not any(allowed(plane, "any-namespace", triple) for triple in denied)


def pods_of(objects: list[Object]) -> list[Object]:
    """Return the pods of a release: the operator's and those of `helm test`."""
    [deployment] = of_kind(objects, "Deployment")
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}}
    return [{**made, "spec": deployment["spec"]["template"]["spec"]}, *of_kind(objects, "Pod")]


@pytest.mark.parametrize("values", [{}, {"tolerations": [{"operator": "Exists"}]}], ids=["defaults", "tolerations"])
def test_every_pod_of_the_chart_passes_pod_security_restricted(
    control_plane: ControlPlane, namespace: str, values: dict[str, Any]
) -> None:
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    control_plane.request("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    pods = pods_of(template(values))
    assert len(pods) == 3
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict"
    for pod in pods:
        pod["metadata"].pop("namespace", None)
        control_plane.request("POST", path, pod)
        root = {**pod, "spec": {**pod["spec"], "securityContext": {}}}
        with pytest.raises(ApiError, match="violates PodSecurity"):
            control_plane.request("POST", path, root)
