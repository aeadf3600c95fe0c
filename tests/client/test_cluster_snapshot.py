"""What is read of a job of a real API server to explain it: which objects, with which rights, and what if it fails."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from ddpjob import Client, DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client import cluster_reader, cluster_snapshot
from ddpjob.errors import JobNotFoundError
from tests.builders import NOW, World, ended, running
from tests.client.worlds import ClusterWorld
from tests.engine.test_plain_scripts import VALUE_ERROR, log
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.kubelet import Kubelet

pytestmark = pytest.mark.apiserver
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
_numbers = itertools.count(1)


@pytest.fixture
def world(control_plane: ControlPlane, namespace: str, proxy: FaultProxy) -> Iterator[ClusterWorld]:
    made = ClusterWorld(control_plane, namespace, proxy.server)
    with made.client:
        yield made


class Simulated:
    """A job of the API server whose operator, pods and claims are simulated, and uploaded as they are."""

    def __init__(self, world: ClusterWorld, **spec: object) -> None:
        self.plane, self.namespace, self.client = world.plane, world.namespace, world.client
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

    def user(self, *rules: Json, server: str = "") -> Client:
        """Return a client for a user who may read DDPJobs, and what the rules allow."""
        name = f"reader-{next(_numbers)}"
        token = self.plane.service_account(self.namespace, name)
        all_rules = [{"apiGroups": [names.GROUP], "resources": [names.DDPJOBS.plural], "verbs": ["get"]}, *rules]
        root = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.plane.request("POST", f"{root}/roles", {"metadata": {"name": name}, "rules": all_rules})
        self.plane.request(
            "POST",
            f"{root}/rolebindings",
            {
                "metadata": {"name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            },
        )
        config = self.plane.kubeconfig(token, name=f"{self.namespace}-{name}", server=server, namespace=self.namespace)
        return Client.cluster(kubeconfig=config, timeout=20)

    def _path(self, resource: names.Resource) -> str:
        return resource.path(self.namespace)


def unschedulable(message: str) -> Json:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def test_a_pod_that_no_node_fits_and_what_a_user_without_rights_sees(world: ClusterWorld, proxy: FaultProxy) -> None:
    made = Simulated(world)
    pod = made.set_pod(0, unschedulable(NO_GPU))
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


def test_a_claim_with_its_event_and_a_quota_with_what_is_used(world: ClusterWorld) -> None:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    made = Simulated(world, checkpoint={"claimTemplate": {"spec": spec}})
    made.write(names.CLAIMS, {"metadata": {"name": "mnist-checkpoints"}, "spec": spec})
    made.event("PersistentVolumeClaim", "mnist-checkpoints", "ProvisioningFailed", "no storage class fast")
    made.set_pod(0, unschedulable("pod has unbound immediate PersistentVolumeClaims."))
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.confidence) == ("Volume", "High")
    assert [(item.kind, item.value) for item in found.evidence[1:]] == [
        ("PersistentVolumeClaim", "Pending"),
        ("PersistentVolumeClaim", "fast"),
        ("Event", "ProvisioningFailed: no storage class fast"),
    ]
    message = "exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4"
    quota = names.Resource("v1", "ResourceQuota", "resourcequotas")
    made.write(quota, {"metadata": {"name": "team"}}, hard={"pods": "4"}, used={"pods": "4"})
    for condition in made.world.status["conditions"]:
        if condition["type"] == "Running":
            condition |= {"status": "False", "reason": "CreateRefused", "message": message}
    made.write_status()
    found = made.client.explain("mnist")
    assert (found.stage, found.evidence[1].value, found.confidence) == ("Quota", "4 of 4", "High")


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


def test_an_operator_that_is_down(world: ClusterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Simulated(world)
    for rank in (0, 1):
        made.set_pod(rank, running())
    made.upload()
    assert made.client.explain("mnist").operator == "Unknown", "its Deployment is not there"
    labels = {"app.kubernetes.io/name": "ddpjob", "app.kubernetes.io/component": "operator"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "operator", "image": "operator:1"}]}}
    deployments = names.Resource("apps/v1", "Deployment", "deployments")
    body = {
        "metadata": {"name": "op", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": pod},
    }
    made.write(deployments, body)
    try:
        found = made.client.explain("mnist")
        assert (found.stage, found.operator, found.confidence) == ("OperatorDown", "Down", "High")
        assert found.evidence[0].name == f"{world.namespace}/op"
        status = {"status": {"replicas": 1, "readyReplicas": 1}}
        world.plane.request("PATCH", f"{deployments.path(world.namespace)}/op/status", status)
        assert made.client.explain("mnist").operator == "Alive"
    finally:
        world.plane.request("DELETE", f"{deployments.path(world.namespace)}/op")


def test_of_a_large_job_the_pods_that_run_are_not_read(
    world: ClusterWorld, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reader, "MANY_NODES", 1)
    monkeypatch.setattr(cluster_snapshot, "MANY_NODES", 1)
    made = Simulated(world)
    made.set_pod(0, running())
    made.set_pod(1, unschedulable(NO_GPU))
    made.upload()
    found = made.client.explain("mnist")
    assert (found.stage, found.missing_nodes) == ("Placement", [1])
    assert [seen for seen in proxy.seen if "/pods" in seen.path and "status.phase" in seen.path]


def test_job_pods_and_operators_are_asked_for_at_once(world: ClusterWorld, proxy: FaultProxy) -> None:
    made = Simulated(world)
    for rank in (0, 1):
        made.set_pod(rank, running())
    made.upload()
    proxy.seen.clear()
    others = ("/pods", "/deployments")

    def rule(request: web.BaseRequest) -> Fault | None:
        """Refuse the job until all else has been asked for."""
        is_early = not all(any(part in seen.path for seen in proxy.seen) for part in others)
        return Fault(status=503) if is_early and request.path.endswith("/ddpjobs/mnist") else None

    proxy.rule = rule
    assert made.client.explain("mnist").stage == "FirstStep"
    asked = [seen.path for seen in proxy.seen if "/ddpjobs/" not in seen.path]
    assert len(asked) == 2, "what has been answered is not asked again"


def test_pods_that_were_listed_before_the_job_changed_or_not_at_all_are_listed_again(
    world: ClusterWorld, proxy: FaultProxy
) -> None:
    made = Simulated(world)
    before = json.dumps(world.plane.request("GET", names.PODS.path(world.namespace)))
    pod = made.set_pod(0, unschedulable(NO_GPU))
    made.upload()
    for early in (Fault(status=200, body=before), Fault(status=500)):
        proxy.seen.clear()
        proxy.rule = lambda request, early=early: early if names.LABEL_JOB_NAME in request.query_string else None  # type: ignore[misc]
        found = made.client.explain("mnist")
        assert (found.stage, found.pod, found.unread) == ("Placement", pod, [])
        assert len([seen for seen in proxy.seen if "/pods" in seen.path]) == 2


def test_a_request_without_an_answer_delays_neither_an_error_nor_the_verdict_twice(
    world: ClusterWorld, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rule = lambda request: Fault(hold=60) if names.LABEL_JOB_NAME in request.query_string else None
    with pytest.raises(JobNotFoundError):
        world.client.explain("absent")
    assert "ddpjob-why" in [thread.name for thread in threading.enumerate()], "the error waits for no other answer"

    monkeypatch.setattr(cluster_reader, "_SECONDS", 3.0)
    made = Simulated(world)
    made.upload()
    proxy.seen.clear()

    def rule(request: web.BaseRequest) -> Fault | None:
        is_first = names.LABEL_JOB_NAME in request.query_string or "/deployments" in request.path
        return Fault(hold=60) if is_first else None

    proxy.rule = rule
    assert "pods could not be read" in made.client.explain("mnist").unread[0]
    for kind in ("deployments", "pods"):
        assert len([seen for seen in proxy.seen if f"/{kind}?" in seen.path]) == 1, kind
