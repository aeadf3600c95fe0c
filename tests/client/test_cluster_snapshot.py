"""What is read of a job of a real API server to explain it: which objects, with which rights, and what if it fails."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpjob import Client, DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client import cluster_reader, cluster_snapshot
from ddpjob.client.bundle.archive import Manifest
from tests.builders import NOW, World, ended, failed, running
from tests.client.situations import unschedulable
from tests.client.worlds import READS_JOBS, ClusterWorld
from tests.engine.test_plain_scripts import VALUE_ERROR, log
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.kubelet import Kubelet

pytestmark = pytest.mark.apiserver
SECRET = "correct-horse-battery"
PENDING = {"phase": "Pending"}
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
_numbers = itertools.count(1)


class Simulated:
    """A job of the API server whose operator, pods and claims are simulated, and uploaded as they are."""

    def __init__(self, world: ClusterWorld, **spec: object) -> None:
        self.cluster, self.plane, self.namespace, self.client = world, world.plane, world.namespace, world.client
        self.job = self.client.submit(DDPJob("mnist", image="trainer:1", num_nodes=2, **spec))
        self.world = World(self.job.manifest | {"status": {}})
        self.world.settle()

    def pod(self, rank: int) -> Json:
        return self.world.pods[names.pod_name("mnist", str(self.job.uid), self.world.status["attempt"], rank)]

    def set_pod(self, rank: int, status: Json) -> str:
        """Let a pod have a status, and the operator see it. Return the pod's name."""
        pod = self.pod(rank)
        pod["status"] = status
        self.world.settle()
        return str(pod["metadata"]["name"])

    def upload(self) -> None:
        for pod in self.world.pods.values():
            meta = {key: value for key, value in pod["metadata"].items() if key != "uid"}
            path = self._path(names.PODS)
            self.plane.request("POST", path, pod | {"metadata": meta})
            self.plane.request("PATCH", f"{path}/{meta['name']}/status", {"status": pod["status"]})
        self.write_status()

    def write_status(self) -> None:
        path = f"{names.DDPJOBS.path(self.namespace)}/mnist/status"
        self.plane.request("PATCH", path, {"status": self.world.status})

    def write(self, resource: names.Resource, body: Json, **status: object) -> None:
        made = self.plane.request("POST", self._path(resource), body)
        if status:
            self.plane.request("PATCH", f"{self._path(resource)}/{made['metadata']['name']}/status", {"status": status})

    def event(self, kind: str, name: str, reason: str, message: str) -> None:
        about = {"kind": kind, "name": name, "namespace": self.namespace}
        text = {"reason": reason, "message": message, "type": "Warning", "lastTimestamp": timestamp(NOW)}
        meta = {"name": f"event-{next(_numbers)}", "namespace": self.namespace}
        self.write(names.EVENTS, {"metadata": meta, "involvedObject": about} | text)

    def user(self, *rules: Json) -> Client:
        """Return a client for a user who may read DDPJobs, and what the rules allow."""
        return self.cluster.user(READS_JOBS, *rules)

    def _path(self, resource: names.Resource) -> str:
        return resource.path(self.namespace)


OPERATOR_LABELS = {"app.kubernetes.io/name": "ddpjob", "app.kubernetes.io/component": "operator"}


@pytest.fixture
def operator(world: ClusterWorld) -> Iterator[str]:
    """Make the Deployment of an operator with no ready pod, and return its path."""
    env = [
        {"name": "DDPJOB_OPERATOR_NAMESPACES", "value": world.namespace},
        {"name": "DDPJOB_OPERATOR_CLUSTER_DOMAIN", "value": "example.internal"},
    ]
    container = {"name": "operator", "image": "operator:1", "env": env}
    template = {"metadata": {"labels": OPERATOR_LABELS}, "spec": {"containers": [container]}}
    path = names.DEPLOYMENTS.path(world.namespace)
    body = {"selector": {"matchLabels": OPERATOR_LABELS}, "template": template}
    world.plane.request("POST", path, {"metadata": {"name": "op", "labels": OPERATOR_LABELS}, "spec": body})
    yield f"{path}/op"
    world.plane.request("DELETE", f"{path}/op")


def let_work(world: ClusterWorld, operator: str) -> None:
    world.plane.request("PATCH", f"{operator}/status", {"status": {"replicas": 1, "readyReplicas": 1}})


def test_a_pod_that_no_node_fits_and_what_a_user_without_rights_sees(world: ClusterWorld, proxy: FaultProxy) -> None:
    made = Simulated(world)
    pod = made.set_pod(0, PENDING | unschedulable(NO_GPU))
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.reason, found.pod, found.confidence) == ("Placement", "Resource", pod, "High")
    assert not found.unread
    with made.user() as poor:
        poorer = poor.explain(made.job)
    assert (poorer.stage, poorer.reason, poorer.confidence) == ("Placement", "Resource", "Medium")
    assert poorer.unread == ["pods could not be read: you may not read this"]
    assert NO_GPU in poorer.sentence
    for fault in (Fault(status=500), Fault(status=200, body="<html>Sign in</html>")):
        proxy.rule = lambda request, fault=fault: fault if "/pods" in request.path else None  # type: ignore[misc]
        assert made.client.explain("mnist").unread


def test_a_claim_with_its_event(world: ClusterWorld) -> None:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    made = Simulated(world, checkpoint={"claimTemplate": {"spec": spec}})
    made.write(names.CLAIMS, {"metadata": {"name": "mnist-checkpoints"}, "spec": spec})
    made.event("PersistentVolumeClaim", "mnist-checkpoints", "ProvisioningFailed", "no storage class fast")
    made.set_pod(0, PENDING | unschedulable("pod has unbound immediate PersistentVolumeClaims."))
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.confidence) == ("Volume", "High")
    assert [(item.kind, item.value) for item in found.evidence[1:]] == [
        ("PersistentVolumeClaim", "Pending"),
        ("PersistentVolumeClaim", "fast"),
        ("Event", "ProvisioningFailed: no storage class fast"),
    ]


def test_the_exception_of_a_script_is_quoted_from_its_log_with_the_users_rights(world: ClusterWorld) -> None:
    made = Simulated(world, restart_policy={"max_restarts": 0})
    for rank in (0, 1):
        made.set_pod(rank, running())
    name = made.set_pod(1, ended(1))
    made.world.forward(130)
    made.world.settle()
    assert made.world.status["state"] == "Failed"
    with Kubelet(world.plane, world.namespace) as kubelet:
        made.pod(1)["spec"] |= {"nodeName": world.namespace}
        made.upload()
        kubelet.serve(name, log(1, VALUE_ERROR).splitlines(keepends=True))
        found = made.client.explain("mnist")
        assert (found.stage, found.exception, found.rank, found.where) == (
            "Crash",
            "ValueError",
            1,
            "/work/train.py:25",
        )
        assert VALUE_ERROR in [item.value for item in found.evidence if item.kind == "Log"]
        pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
        with made.user(pods) as reader:
            poorer = reader.explain("mnist")
        assert (poorer.stage, poorer.exception, poorer.exit_code, poorer.confidence) == ("Crash", None, 1, "Low")
        assert len(poorer.unread) == 1 and "log" in poorer.unread[0]
    for pod in made.world.pods.values():
        path = f"{names.PODS.path(world.namespace)}/{pod['metadata']['name']}?gracePeriodSeconds=0"
        world.plane.request("DELETE", path)
    gone = made.client.explain("mnist")
    assert (gone.stage, gone.exit_code, gone.node_rank, gone.unread) == ("Crash", 1, 1, [])


def test_an_operator_that_is_down_and_one_that_works(world: ClusterWorld, operator: str) -> None:
    made = Simulated(world)
    for rank in (0, 1):
        made.set_pod(rank, running())
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.operator, found.confidence) == ("OperatorDown", "Down", "High")
    assert found.evidence[0].name == f"{world.namespace}/op"
    assert {check.name: check.status for check in made.client.check()}["operator"] == "error"
    let_work(world, operator)
    assert made.client.explain("mnist").operator == "Alive"


def test_the_checks_of_an_administrator_and_of_a_user_without_rights(world: ClusterWorld, operator: str) -> None:
    let_work(world, operator)
    found = {check.name: check.status for check in world.client.check()}
    assert found == {"api-server": "ok", "operator": "ok"}
    with Simulated(world).user() as poor:
        checks = {check.name: check for check in poor.check()}
    assert [checks[name].status for name in found] == ["ok", "unknown"]
    assert "you may not read this" in checks["operator"].summary


def test_a_bundle_has_what_the_user_may_read_and_with_logs_the_operators_log_of_the_job(
    world: ClusterWorld, operator: str, tmp_path: Path
) -> None:
    let_work(world, operator)
    made = Simulated(world, env={"MY_TOKEN": SECRET})
    for rank in (0, 1):
        made.set_pod(rank, running())
    crashed = failed(1, kind="HTTPError", exception="HTTPError", message=f"refused: {SECRET}", step=3)
    made.pod(1)["status"] = crashed  # the operator has not seen it
    made.upload()
    made.event("Pod", str(made.pod(1)["metadata"]["name"]), "BackOff", f"env MY_TOKEN={SECRET}")
    made.event("Pod", "another", "BackOff", "of another job")
    service = made.world.service or {}
    made.write(names.SERVICES, service | {"metadata": {**service["metadata"], "uid": None}})

    def bundled(client: Client, *, logs: bool = False) -> tuple[Manifest, dict[str, str]]:
        file = tmp_path / f"{next(_numbers)}.zip"
        manifest = client.bundle("mnist", file, logs=logs)
        with zipfile.ZipFile(file) as zipped:
            found = {name: zipped.read(name).decode() for name in zipped.namelist()}
        assert SECRET not in "".join(found.values()) and "of another job" not in "".join(found.values())
        return manifest, found

    with made.user() as poor:
        manifest, found = bundled(poor)
    assert [*manifest.files] == ["job.json"]
    unread = {*manifest.unread}
    assert unread == {"pods", "events", "service", "networkPolicy", "operator"}
    of_operator = {"name": "operator", "image": "operator:1"}
    with Kubelet(world.plane, world.namespace) as kubelet:
        pod_spec = {"nodeName": world.namespace, "containers": [of_operator]}
        made.write(names.PODS, {"metadata": {"name": "op-1", "labels": OPERATOR_LABELS}, "spec": pod_spec})
        line = {"ts": timestamp(NOW), "message": f"event Restarting token={SECRET}", "namespace": world.namespace}
        lines = [json.dumps(line | {"job": "mnist"}), json.dumps(line | {"job": "other"}), "no JSON"]
        kubelet.serve("op-1", [f"{text}\n" for text in lines])
        manifest, found = bundled(made.client)
        assert {*found} == {"manifest.json", "job.json", "pods.json", "others.json", "events.json", "operators.json"}
        assert "BackOff" in found["events.json"] and "example.internal" in found["operators.json"]
        manifest, found = bundled(made.client, logs=True)
    assert "Restarting" in found["operator.log"] and len(found["operator.log"].splitlines()) == 1
    assert manifest.unread == {}
    assert manifest.versions["operatorImage"] == "operator:1" and manifest.versions["kubernetes"].startswith("v1.")


def test_of_a_large_job_the_pods_that_run_are_not_read(
    world: ClusterWorld, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reader, "MANY_NODES", 1)
    monkeypatch.setattr(cluster_snapshot, "MANY_NODES", 1)
    made = Simulated(world)
    made.set_pod(0, running())
    made.set_pod(1, PENDING | unschedulable(NO_GPU))
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.missing_nodes) == ("Placement", [1])
    assert [seen for seen in proxy.seen if "/pods" in seen.path and "status.phase" in seen.path]


def test_a_request_without_an_answer_delays_the_verdict_for_a_limited_time(
    world: ClusterWorld, proxy: FaultProxy
) -> None:
    made = Simulated(world)
    made.upload()
    proxy.rule = lambda request: Fault(hold=60) if "/pods" in request.path or "/deployments" in request.path else None
    assert "pods could not be read" in made.client.explain("mnist").unread[0]
