"""The operator as a process with only the chart's rights, from the creation of a job to its deletion."""

from typing import Any

import pytest
import yaml

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests import queues
from tests.builders import ended, running
from tests.controller.operator_process import OperatorProcess
from tests.install.chart import CHART, NAMESPACE, helm
from tests.install.test_examples import EXAMPLES
from tests.install.test_rights import GANG_GROUPS, OPERATOR, QUEUES, gang_rights
from tests.prepared import program
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane
from tests.worlds.custom_resources import pod_groups

pytestmark = pytest.mark.apiserver
TEAM = "team-a"
JOBS = f"/{names.DDPJOBS.path(TEAM)}"
CORE = f"/api/v1/namespaces/{TEAM}"
WRITES = {"create", "update", "patch", "delete"}
GANGS = {
    "kubernetes": names.KUBERNETES_GROUPS[1],
    "volcano": names.VOLCANO_GROUPS,
    "coscheduling": names.COSCHEDULING_GROUPS,
}
READS_OF_GROUPS: Json = {
    "level": "Metadata",
    "resources": [{"group": group, "resources": ["podgroups"]} for group in GANG_GROUPS.values()],
}
# Needed with the admission plugin OwnerReferencesPermissionEnforcement.
NOT_SEEN = {("ddpjob.dev", "ddpjobs/finalizers", "update")}


def pods_of_attempt(plane: ControlPlane, attempt: int) -> list[dict[str, Any]]:
    found = plane.request("GET", f"{CORE}/pods?labelSelector={names.LABEL_ATTEMPT}%3D{attempt}")["items"]
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"])) if len(found) == 2 else []


def end_pod(plane: ControlPlane, pod: dict[str, Any], code: int) -> None:
    """Set the pod's status, as a kubelet does when the trainer ends and the sidecar runs on."""
    (trainer,) = ended(code)["containerStatuses"]
    common = {"image": "", "imageID": "", "ready": True, "restartCount": 0}
    states = [common | trainer, common | {"name": "sidecar", "state": {"running": {}}}]
    status = {"phase": "Running", "containerStatuses": states}
    plane.request("PATCH", f"{CORE}/pods/{pod['metadata']['name']}/status", {"status": status})


def gone(plane: ControlPlane, path: str) -> bool:
    try:
        plane.request("GET", path)
    except ApiError as error:
        return error.status == 404
    return False


def used_by(plane: ControlPlane, account: str) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of every request of an account in the audit log."""
    used = set()
    for event in plane.writes():
        if event["user"]["username"] == account:
            where = event["objectRef"]
            resource = "/".join(filter(None, (where["resource"], where.get("subresource"))))
            used.add((where.get("apiGroup", ""), resource, event["verb"]))
    return used


@pytest.mark.parametrize(
    ("scope", "scheduler"),
    [("cluster", "volcano"), pytest.param("namespace", "coscheduling", marks=pytest.mark.soak)],
)
def test_chart_rights_suffice_and_all_are_used(scope: str, scheduler: str) -> None:
    """With scope cluster the job is also in a queue of Kueue. For PodGroups of Kubernetes: tests/gangs."""
    check_rights(ControlPlane(audit=True), scope, scheduler, queued=scope == "cluster")


def check_rights(plane: ControlPlane, scope: str, scheduler: str, *, queued: bool = False) -> None:
    """Run the operator with the chart's rights on a control plane that was not started.

    Writes are recorded, and of PodGroups reads, too.
    """
    program("helm")
    plane.audit_rules = [*plane.audit_rules, READS_OF_GROUPS]
    served = TEAM if scope == "namespace" else ""
    with plane:
        plane.make_namespace(TEAM)
        plane.apply_crd()  # waits until it is served
        where = ("--kubeconfig", str(plane.kubeconfig()), "--namespace", NAMESPACE, "--create-namespace")
        values = (
            "--set",
            f"crds.install=false,scope={scope},kueue.enabled={str(queued).lower()},scheduling.gangScheduler={scheduler}",
            "--set-json",
            f'namespaces=["{TEAM}"]' if served else "namespaces=[]",
        )
        done = helm("install", "ddpjob", str(CHART), *where, *values)
        assert done.returncode == 0, done.stderr
        if queued:
            queues.install(plane)
        if scheduler != "kubernetes":
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            plane.request("POST", path, pod_groups(GANGS[scheduler]))
            groups = f"/{GANGS[scheduler].path()}"
            eventually("PodGroups are served", lambda: not gone(plane, groups))
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/ddpjob-operator/token"
        token = plane.request("POST", account, request)["status"]["token"]
        settings: Json = {"sweep_interval_seconds": 5, "kueue": queued, "gang_scheduler": scheduler}
        with OperatorProcess(plane, served, token=token, **settings) as operator:
            live_through(plane, GANGS[scheduler], queued=queued)
            assert "forbidden" not in operator.text().lower(), operator.text()
        used = used_by(plane, f"system:serviceaccount:{NAMESPACE}:ddpjob-operator")
    granted = {triple for triple in OPERATOR | (QUEUES if queued else set()) if triple[2] in WRITES}
    granted |= gang_rights(scheduler)
    assert used <= granted
    assert granted - used <= NOT_SEEN


def check_network_policy(plane: ControlPlane, job: str, name: str) -> None:
    """Edit and delete the job's NetworkPolicy: it is restored. Switch it off: it is deleted."""
    policy = f"/{names.NETWORK_POLICIES.path(TEAM)}/{name}"
    whole = plane.request("GET", policy)["spec"]
    plane.request("PATCH", policy, {"spec": {"ingress": [{}], "podSelector": {"matchLabels": {"app": "another"}}}})
    eventually("the policy is restored", lambda: plane.request("GET", policy)["spec"] == whole)
    plane.request("DELETE", policy)
    eventually("the policy is created again", lambda: not gone(plane, policy))
    plane.request("PATCH", job, {"spec": {"networkPolicy": None}})
    eventually("the policy is deleted", lambda: gone(plane, policy))


def enter(plane: ControlPlane, queue: queues.Queue) -> None:
    """Suspend and resume the job in the queue, and let it be admitted."""
    eventually("the Workload exists", lambda: queue.of("mnist-cpu"))
    for suspend in (True, False):
        plane.request("PATCH", f"{JOBS}/mnist-cpu", {"spec": {"suspend": suspend}})
        eventually("the Workload follows", lambda wanted=not suspend: queue.of("mnist-cpu")["spec"]["active"] is wanted)
    queue.cycle()


def fail(plane: ControlPlane, pod: Json, kind: Resource) -> None:
    """Let a pod of attempt 1 fail, and stop. A PodGroup of no job has the name of attempt 2's, so attempt 3 follows."""
    uid = plane.request("GET", f"{JOBS}/mnist-cpu")["metadata"]["uid"]
    first, name = (names.group_name("mnist-cpu", uid, attempt) for attempt in (1, 2))
    spec = {"schedulingPolicy": {"gang": {"minCount": 2}}}
    body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "spec": spec}
    plane.request("POST", f"/{kind.path(TEAM)}", body)
    end_pod(plane, pod, 1)
    eventually("attempt 3 starts", lambda: pods_of_attempt(plane, 3))
    plane.request("DELETE", f"{CORE}/pods/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    eventually("the group of attempt 1 is deleted", lambda: gone(plane, f"/{kind.path(TEAM)}/{first}"))


def live_through(plane: ControlPlane, kind: Resource, *, queued: bool) -> None:
    """Let a job with a claim template and a sidecar start, fail once, succeed, and delete itself. kind: of its gang."""
    job = yaml.safe_load((EXAMPLES / "mnist-cpu.yaml").read_text(encoding="utf-8"))
    job["spec"] |= {"ttlSecondsAfterFinished": 0, "networkPolicy": "Isolated"}
    job["spec"]["template"] = {"spec": {"containers": [{"name": "sidecar", "image": "sidecar:1"}]}}
    if queued:
        job["metadata"]["labels"] = {names.LABEL_QUEUE: "research", names.LABEL_QUEUE_PRIORITY: queues.CLASS}
    plane.request("POST", JOBS, job)
    queue = queues.Queue(plane, TEAM, quota=2)
    if queued:
        enter(plane, queue)
    first, second = eventually("both pods of attempt 1", lambda: pods_of_attempt(plane, 1))
    service = f"{CORE}/services/{first['spec']['subdomain']}"
    plane.request("PATCH", service, {"spec": {"selector": {"app": "another"}}})
    assert plane.request("GET", f"{CORE}/persistentvolumeclaims/mnist-cpu-checkpoints")
    eventually("the Service is restored", lambda: "app" not in plane.request("GET", service)["spec"]["selector"])
    check_network_policy(plane, f"{JOBS}/mnist-cpu", first["spec"]["subdomain"])
    # A failure counts for the attempt only after the status has all pods.
    path = f"{JOBS}/mnist-cpu"
    eventually("the status has both pods", lambda: plane.request("GET", path)["status"]["nodes"]["pending"] == 2)
    fail(plane, second, kind)
    pods = eventually("both pods of attempt 3", lambda: pods_of_attempt(plane, 3))
    if queued:
        for pod in pods:
            plane.request("PATCH", f"{CORE}/pods/{pod['metadata']['name']}/status", {"status": running()})
        eventually("PodsReady is written", lambda: queue.condition("mnist-cpu", "PodsReady")[0] == "True")
    for pod in pods:
        end_pod(plane, pod, 0)
    eventually("the job deleted itself", lambda: gone(plane, path))
