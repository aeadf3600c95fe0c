"""`ddpjob bundle` and `doctor` on a real API server, with the rights of the chart's roles `view` and `edit`.

The roles of the chart extend those of Kubernetes by aggregation, for which the control plane of the tests has no
controller: users are bound to the parts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.builders import failed, running
from tests.cli.program import ROOT, Program
from tests.client.test_cluster_snapshot import Simulated
from tests.client.worlds import ClusterWorld
from tests.json_schema import faults
from tests.worlds.control_plane import ApiError, ControlPlane
from tests.worlds.kubelet import Kubelet

pytestmark = pytest.mark.apiserver
ROLES = {
    "viewer": ("ddpjob-view", "system:aggregate-to-view"),
    "editor": ("ddpjob-view", "ddpjob-edit", "system:aggregate-to-view", "system:aggregate-to-edit"),
    "stranger": (),
}
SECRET = "correct-horse-battery"
OPERATOR_LABELS = {"app.kubernetes.io/name": "ddpjob", "app.kubernetes.io/component": "operator"}
DEPLOYMENTS = names.Resource("apps/v1", "Deployment", "deployments")


@pytest.fixture
def ddpjob(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def world(control_plane: ControlPlane, namespace: str) -> Iterator[ClusterWorld]:
    for role in yaml.safe_load_all((ROOT / "manifests" / "rbac.yaml").read_text(encoding="utf-8")):
        if role["kind"] == "ClusterRole" and role["metadata"]["name"] in ROLES["editor"]:
            create(control_plane, "clusterroles", role)
    made = ClusterWorld(control_plane, namespace)
    with made.client:
        yield made


def create(plane: ControlPlane, plural: str, body: Json) -> None:
    try:
        plane.request("POST", f"/apis/rbac.authorization.k8s.io/v1/{plural}", body)
    except ApiError as error:
        if error.status != 409:
            raise


def user(ddpjob: Program, world: ClusterWorld, role: str) -> Program:
    """Return the program with the kubeconfig of a user who has a role in the namespace of the test."""
    token = world.plane.service_account(world.namespace, role)
    for number, part in enumerate(ROLES[role]):
        subject = {"kind": "ServiceAccount", "name": role, "namespace": world.namespace}
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": part}
        binding = {"metadata": {"name": f"{role}-{number}"}, "subjects": [subject], "roleRef": ref}
        create(world.plane, f"namespaces/{world.namespace}/rolebindings", binding)
    config = world.plane.kubeconfig(token, name=f"{world.namespace}-{role}", namespace=world.namespace)
    return with_kubeconfig(ddpjob, config)


def with_kubeconfig(ddpjob: Program, config: Path) -> Program:
    made = Program(ddpjob.folder)
    made.environment["KUBECONFIG"] = str(config)
    return made


def admin(ddpjob: Program, world: ClusterWorld) -> Program:
    config = world.plane.kubeconfig(name=world.namespace, namespace=world.namespace)
    return with_kubeconfig(ddpjob, config)


@pytest.fixture
def crashed(world: ClusterWorld) -> Simulated:
    """Make a job whose node 1 has failed, which its operator has not seen."""
    made = Simulated(world, env={"MY_TOKEN": SECRET})
    made.set_pod(0, running())
    made.set_pod(1, running())
    pod = made.pod(1)
    pod["status"] = failed(1, kind="HTTPError", exception="HTTPError", message=f"refused: {SECRET}", step=3)
    made.upload()
    made.event("Pod", str(pod["metadata"]["name"]), "BackOff", f"env MY_TOKEN={SECRET}")
    made.event("Pod", "another", "BackOff", "of another job")
    assert made.world.service is not None
    service = made.world.service
    meta = {key: value for key, value in service["metadata"].items() if key != "uid"}
    made.write(names.SERVICES, service | {"metadata": meta})
    return made


@pytest.fixture
def operator(world: ClusterWorld) -> Iterator[str]:
    """Make the Deployment of an operator that works and that has its own cluster domain."""
    env = [
        {"name": "DDPJOB_OPERATOR_NAMESPACES", "value": world.namespace},
        {"name": "DDPJOB_OPERATOR_CLUSTER_DOMAIN", "value": "example.internal"},
        {"name": "DDPJOB_OPERATOR_POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    container = {"name": "operator", "image": "registry.example.com/ddpjob/operator:1", "env": env}
    template = {"metadata": {"labels": OPERATOR_LABELS}, "spec": {"containers": [container]}}
    path = DEPLOYMENTS.path(world.namespace)
    body = {"selector": {"matchLabels": OPERATOR_LABELS}, "template": template}
    world.plane.request("POST", path, {"metadata": {"name": "op", "labels": OPERATOR_LABELS}, "spec": body})
    world.plane.request("PATCH", f"{path}/op/status", {"status": {"replicas": 1, "readyReplicas": 1}})
    yield "op"
    world.plane.request("DELETE", f"{path}/op")


def bundled(program: Program, *options: str) -> tuple[Json, str]:
    """Return the manifest of a bundle, and all its text."""
    done = program("bundle", "mnist", "-f", "b.zip", "-o", "json", *options)
    assert (done.code, done.err) == (0, ""), done
    with zipfile.ZipFile(program.folder / "b.zip") as zipped:
        return json.loads(done.out), "".join(zipped.read(name).decode() for name in zipped.namelist())


def test_a_bundle_by_a_user_with_the_role_view_says_what_is_missing(
    ddpjob: Program, world: ClusterWorld, crashed: Simulated, operator: str
) -> None:
    viewer = user(ddpjob, world, "viewer")
    manifest, text = bundled(viewer)
    assert {one["path"] for one in manifest["files"]} == {
        "job.json",
        "pods.json",
        "others.json",
        "events.json",
    }
    assert {one["what"] for one in manifest["unread"]} == {"metrics", "operator"}
    assert manifest["versions"]["kubernetes"].startswith("v1.")
    assert SECRET not in text and "of another job" not in text and "BackOff" in text


def test_a_bundle_has_the_operators_settings_and_with_logs_its_log_of_the_job(
    ddpjob: Program, world: ClusterWorld, crashed: Simulated, operator: str
) -> None:
    def line(job: str, message: str) -> str:
        known = {"namespace": world.namespace, "job": job}
        return json.dumps({"ts": "2026-03-01T12:00:00Z", "logger": "ddpjob", "message": message} | known) + "\n"

    program = admin(ddpjob, world)
    pod = {"metadata": {"name": "op-1", "labels": OPERATOR_LABELS}}
    container = {"name": "operator", "image": "operator:1"}
    with Kubelet(world.plane, world.namespace) as kubelet:
        crashed.write(names.PODS, pod | {"spec": {"nodeName": world.namespace, "containers": [container]}})
        lines = [line("mnist", f"event Restarting token={SECRET}"), line("other", "of another job")]
        kubelet.serve("op-1", [*lines, "no JSON\n"])
        without = bundled(program)[1]
        (program.folder / "b.zip").unlink()
        manifest, text = bundled(program, "--logs")
        with zipfile.ZipFile(program.folder / "b.zip") as zipped:
            logged = zipped.read("operator.log").decode()
    assert "Restarting" in logged and len(logged.splitlines()) == 1
    assert "event Restarting" not in without
    assert "example.internal" in without
    assert {one["what"] for one in manifest["unread"]} == {"metrics"}
    assert manifest["versions"]["operatorImage"] == "registry.example.com/ddpjob/operator:1"
    assert SECRET not in text + without


def test_without_rights_there_is_no_bundle(ddpjob: Program, world: ClusterWorld, crashed: Simulated) -> None:
    done = user(ddpjob, world, "stranger")("bundle", "mnist", "-f", "b.zip")
    assert (done.code, done.err.splitlines()[0][:18]) == (1, "error: not allowed")
    assert not (ddpjob.folder / "b.zip").exists()


def checks_of(program: Program) -> dict[str, Json]:
    done = program("doctor", "-o", "json")
    found = json.loads(done.out)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "doctor.json").read_text(encoding="utf-8"))
    assert not list(faults(found, schema))
    assert done.code == (0 if found["healthy"] else 1)
    return {check["name"]: check for check in found["checks"] if check["part"] == "cluster"}


def test_doctor_by_an_administrator_judges_all_parts(ddpjob: Program, world: ClusterWorld, operator: str) -> None:
    program = admin(ddpjob, world)
    classes = "/apis/storage.k8s.io/v1/storageclasses"
    name = f"local-{world.namespace}"
    world.plane.request("POST", classes, {"metadata": {"name": name}, "provisioner": "rancher.io/local-path"})
    try:
        found = checks_of(program)
    finally:
        world.plane.request("DELETE", f"{classes}/{name}")
    assert {name: check["status"] for name, check in found.items()} == {
        "api-server": "ok",
        "crd": "ok",
        "rights": "ok",
        "operator": "ok",
        "storage": "warning",
    }
    world.plane.request("PATCH", f"{DEPLOYMENTS.path(world.namespace)}/op/status", {"status": {"readyReplicas": 0}})
    down = checks_of(program)["operator"]
    assert (down["status"], f"{world.namespace}/op: 0 of 1" in down["summary"]) == ("error", True)


@pytest.mark.parametrize(
    ("role", "rights"),
    [("viewer", "warning"), pytest.param("editor", "ok", marks=pytest.mark.soak), ("stranger", "error")],
)
def test_doctor_tells_a_user_what_it_may_not_see(ddpjob: Program, world: ClusterWorld, role: str, rights: str) -> None:
    found = checks_of(user(ddpjob, world, role))
    statuses = {name: check["status"] for name, check in found.items()}
    assert (statuses["rights"], statuses["crd"], statuses["api-server"]) == (rights, "ok", "ok"), found
    for name in ("operator", "storage"):
        assert statuses[name] == "unknown", found[name]
        assert "you may not read this" in found[name]["summary"]
