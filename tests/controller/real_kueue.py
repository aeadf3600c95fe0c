"""The operator with Kueue itself on a real API server. `make soak` runs it: Kueue takes minutes to build.

The queue has quota for one of three jobs, so that each waits, is preempted, or preempts another.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, condition, is_true
from ddpjob.api.times import timestamp
from tests.controller.jobs import Jobs
from tests.controller.kueue_manager import KueueManager
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane

API = "kueue.x-k8s.io/v1beta2"
TEAM = "team-a"
SECONDS = 120.0


class Cluster:
    """A queue of Kueue with quota for two pods, and jobs of two pods in it."""

    def __init__(self, plane: ControlPlane, kueue: KueueManager) -> None:
        self.plane, self.kueue, self.jobs = plane, kueue, Jobs(plane, TEAM)
        flavor = {"kind": "ResourceFlavor", "metadata": {"name": "spot"}, "spec": {"nodeLabels": {"pool": "spot"}}}
        kueue.create(API, "resourceflavors", flavor)
        kueue.create(
            API,
            "workloadpriorityclasses",
            {"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 9},
        )
        quota = {"name": "spot", "resources": [{"name": "cpu", "nominalQuota": "2"}]}
        queue = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [quota]}],
        }
        kueue.create(API, "clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": queue})
        local = {"kind": "LocalQueue", "metadata": {"name": "research"}, "spec": {"clusterQueue": "all"}}
        kueue.create(API, "localqueues", local, namespace=TEAM)

    def submit(self, name: str, *, nodes: int = 2, template: Json | None = None, **labels: str) -> None:
        resources = {"requests": {"cpu": "1"}}
        metadata = {"name": name, "labels": {names.LABEL_QUEUE: "research"} | labels}
        body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata}
        spec: Json = {"image": "trainer:1", "numNodes": nodes, "resources": resources}
        spec |= {"template": template} if template else {}
        self.plane.request("POST", self.jobs.path, body | {"spec": spec})

    def workload(self, name: str) -> Json:
        uid = self.jobs.get(name)["metadata"]["uid"]
        path = f"/{names.WORKLOADS.path(TEAM)}/{names.service_name(name, uid)}"
        try:
            return self.plane.request("GET", path)
        except ApiError as error:
            assert error.status == 404, error
            return {}

    def waits(self, name: str, text: str = "") -> bool:
        running = self.jobs.condition("Running", name)
        return running.get("reason") == "WaitingForQuota" and text in running["message"]

    def run(self, name: str, attempt: int = 1, *, nodes: int = 2) -> list[Json]:
        """Wait for the admission of a job, and run its pods."""
        pods = self.until(f"{name} is admitted", lambda: self._all(name, attempt, nodes))
        assert all(pod["spec"]["nodeSelector"] == {"pool": "spot"} for pod in pods)
        for pod in pods:
            self.jobs.run(pod)
        self.jobs.wait_for("Running", name)
        return pods

    def _all(self, name: str, attempt: int, nodes: int) -> list[Json] | None:
        assert sum("deletionTimestamp" not in pod["metadata"] for pod in self.used()) <= 2, "more pods than quota"
        pods = self.jobs.pods(name, attempt)
        return pods if len(pods) == nodes else None

    def used(self) -> list[Json]:
        """Return the pods of all jobs that have not ended."""
        return [pod for pod in self.jobs.objects("pods") if pod["status"]["phase"] in ("Pending", "Running")]

    def finish(self, name: str, pods: list[Json]) -> None:
        for pod in pods:
            self.jobs.end(pod, 0)
        self.jobs.wait_for("Succeeded", name)
        self.until(f"{name} released its quota", lambda: is_true(self.workload(name)["status"], "Finished"))

    def until(self, what: str, probe: object) -> object:
        try:
            return eventually(what, probe, timeout=SECONDS, interval=0.1)  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.kueue.text()}") from error


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ControlPlane(audit=True) as plane:
        plane.make_namespace(TEAM)
        plane.apply_crd()
        with KueueManager(plane) as kueue, OperatorProcess(plane, TEAM, kueue=True, sweep_interval_seconds=5):
            yield Cluster(plane, kueue)


def test_kueue_admits_preempts_and_admits_again_three_jobs_of_one_queue(cluster: Cluster) -> None:
    jobs = cluster.jobs
    cluster.submit("first")
    first = cluster.run("first")
    # Of two Workloads of the same second, Kueue takes the one with the lower uid first.
    created = cluster.workload("first")["metadata"]["creationTimestamp"]
    cluster.until("a later second begins", lambda: timestamp(datetime.now(UTC)) > created)
    cluster.submit("second")
    cluster.until("the second job waits", lambda: cluster.waits("second", "insufficient unused quota"))

    jobs.end(first[1], 1)
    cluster.run("first", 2)
    assert is_true(cluster.workload("first")["status"], "Admitted"), "a restart keeps the quota"

    cluster.submit("third", **{names.LABEL_QUEUE_PRIORITY: "urgent"})
    third = cluster.run("third")
    evicted = condition(cluster.workload("first")["status"], "Evicted")
    assert (evicted["status"], evicted["reason"]) == ("True", "Preempted")
    cluster.until("the first job waits again", lambda: cluster.waits("first", "insufficient"))
    assert jobs.status("first")["restarts"] == 1
    cluster.finish("third", third)

    cluster.finish("first", cluster.run("first", 3))
    cluster.finish("second", cluster.run("second"))
    refused = [write for write in jobs.writes() if write[1].startswith("workloads") and write[3] >= 400]
    assert all(code == 409 for *_, code in refused), refused


def test_suspension_and_size_of_a_job_that_waits_and_of_one_that_runs(cluster: Cluster) -> None:
    cluster.submit("sized")
    cluster.run("sized")
    cluster.submit("waiting", nodes=1)
    cluster.until("it waits", lambda: cluster.waits("waiting", "insufficient"))
    path = cluster.jobs.path
    for name in ("waiting", "sized"):
        cluster.plane.request("PATCH", f"{path}/{name}", {"spec": {"suspend": True}})
        cluster.jobs.wait_for("Suspended", name)
        cluster.until("it left the queue", lambda name=name: _is_out(cluster.workload(name)))
    cluster.plane.request("PATCH", f"{path}/sized", {"spec": {"suspend": False, "numNodes": 1}})
    sized = cluster.run("sized", 2, nodes=1)
    cluster.plane.request("PATCH", f"{path}/waiting", {"spec": {"suspend": False}})
    cluster.finish("waiting", cluster.run("waiting", nodes=1))
    cluster.finish("sized", sized)


def _is_out(workload: Json) -> bool:
    return workload["spec"]["active"] is False and not is_true(workload["status"], "QuotaReserved")


def test_a_workload_that_is_deactivated_or_deleted(cluster: Cluster) -> None:
    cluster.submit("moved")
    cluster.run("moved")
    name = cluster.workload("moved")["metadata"]["name"]
    path = f"/{names.WORKLOADS.path(TEAM)}/{name}"
    cluster.plane.request("PATCH", path, {"spec": {"active": False}})
    running = lambda: cluster.jobs.condition("Running", "moved")  # noqa: E731
    cluster.until("the job is held", lambda: running()["reason"] == "QueueDeactivated")
    cluster.until("the quota is released", lambda: not is_true(cluster.workload("moved")["status"], "QuotaReserved"))
    cluster.plane.request("PATCH", path, {"spec": {"active": True}})
    cluster.run("moved", 2)
    old = cluster.workload("moved")["metadata"]["uid"]
    _give_back(cluster, path, 1)
    with pytest.raises(ApiError, match="cannot be less than 1"):  # so a smaller job keeps its quota, to grow again
        _give_back(cluster, path, 0)
    cluster.plane.request("DELETE", path)

    def runs_again() -> bool:
        """Whether a new Workload is admitted: perhaps before the operator sees that it was not."""
        for pod in cluster.jobs.pods("moved"):
            if pod["status"]["phase"] == "Pending":
                cluster.jobs.run(pod)
        found, status = cluster.workload("moved"), cluster.jobs.status("moved")
        is_new = bool(found) and found["metadata"]["uid"] != old and is_true(found.get("status"), "Admitted")
        return is_new and status["state"] == "Running"

    cluster.until("the job runs with a new Workload", runs_again)
    number = cluster.jobs.status("moved")["attempt"]
    cluster.finish("moved", cluster.jobs.pods("moved", number))
    assert cluster.jobs.status("moved")["restarts"] == 0


def _give_back(cluster: Cluster, path: str, count: int) -> None:
    """Release the quota of some pods of a Workload."""
    pods = [{"name": "main", "count": count}]
    cluster.plane.request("PATCH", f"{path}/status", {"status": {"reclaimablePods": pods}})


def _edit(suspend: bool, policy: str) -> Json:
    """Return an edit of a field that the definition of DDPJobs does not know: it may change at a suspension."""
    return {"spec": {"suspend": suspend, "template": {"spec": {"dnsPolicy": policy}}}}


def test_a_job_that_is_held_or_has_left_its_queue_lets_another_one_have_its_quota(cluster: Cluster) -> None:
    jobs, count = cluster.jobs, len(cluster.jobs.writes())
    path = f"{jobs.path}/held"
    cluster.submit("held", template={"spec": {"dnsPolicy": "Default"}})
    cluster.run("held")
    cluster.submit("next")
    cluster.until("the next job waits", lambda: cluster.waits("next", "insufficient"))
    cluster.plane.request("PATCH", path, _edit(True, "Default"))
    jobs.wait_for("Suspended", "held")
    cluster.plane.request("PATCH", path, _edit(False, "ClusterFirst"))
    follows = cluster.run("next")
    cluster.until("the job is held", lambda: jobs.condition("Stalled", "held")["reason"] == "SpecChanged")
    cluster.finish("next", follows)
    assert _is_out(cluster.workload("held")), "nothing uses the quota now, and the job does not ask for it"
    cluster.plane.request("PATCH", path, _edit(True, "Default"))
    cluster.plane.request("PATCH", path, _edit(False, "Default"))
    again = cluster.run("held", 2)

    workload = f"/{names.WORKLOADS.path(TEAM)}/{cluster.workload('held')['metadata']['name']}"
    # Any user of a queue may do this; what follows does not change.
    cluster.plane.request("PATCH", workload, {"metadata": {"labels": {names.LABEL_JOB_UID: None}}})

    cluster.submit("last")
    cluster.until("the last job waits", lambda: cluster.waits("last", "insufficient"))
    cluster.plane.request("PATCH", path, {"metadata": {"labels": {names.LABEL_QUEUE: None}}})
    cluster.until("Kueue evicts it", lambda: is_true(cluster.workload("held")["status"], "Evicted"))
    assert is_true(cluster.workload("held")["status"], "QuotaReserved"), "its pods run"
    jobs.end(again[1], 1)
    outside = jobs.wait_for_pods(2, "held", 3)
    assert "nodeSelector" not in outside[0]["spec"]
    cluster.until("the last job is admitted", lambda: is_true(cluster.workload("last").get("status"), "Admitted"))
    cluster.finish("held", outside)
    cluster.finish("last", cluster.run("last"))
    refused = [write for write in jobs.writes(since=count) if write[1].startswith("workloads") and write[3] >= 400]
    assert all(code == 409 for *_, code in refused), refused
