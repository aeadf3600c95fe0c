"""The operator as a process with a real API server: a job from apply to its end."""

import json

import pytest

from ddpjob.api import names
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually

pytestmark = pytest.mark.apiserver


def test_job_creates_exactly_the_planned_objects_and_then_writes_nothing(operator: OperatorProcess, jobs: Jobs) -> None:
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    job = jobs.submit(numNodes=3, checkpoint={"claimTemplate": claim})
    uid = job["metadata"]["uid"]
    jobs.wait_for("Pending", nodes={"desired": 3, "pending": 3, "running": 0, "succeeded": 0, "failed": 0})
    jobs.settle()
    assert jobs.owned("pods") == [names.pod_name("mnist", uid, 1, rank) for rank in range(3)]
    assert jobs.owned("services") == [names.service_name("mnist", uid)]
    assert [claim["metadata"]["name"] for claim in jobs.objects("persistentvolumeclaims")] == ["mnist-checkpoints"]
    writes = jobs.writes(about="mnist")
    assert {code for *_, code in writes} <= {200, 201}, writes
    made = [(verb, resource) for verb, resource, *_ in writes]
    assert made[0] == ("patch", "ddpjobs/status"), "the decision is written before anything is made"
    assert made.count(("create", "pods")) == 3
    assert made.count(("create", "services")) == 1
    assert made.count(("create", "persistentvolumeclaims")) == 1
    assert made.count(("patch", "ddpjobs/status")) == 2
    assert made.count(("create", "events")) == 1
    assert len(made) == 8, made
    assert operator.metric("ddpjob_jobs", state="Pending") >= 1
    assert operator.metric("ddpjob_api_request_duration_seconds_count", verb="create", kind="Pod", code="201") >= 3
    assert operator.metric("ddpjob_reconcile_errors_total") == 0
    assert 0 <= operator.metric("ddpjob_watch_age_seconds", path=jobs.path) < 90
    text = operator.text().splitlines()
    assert len(operator.lines()) == len(text), [line for line in text if not line.startswith("{")]
    about = [line for line in operator.lines() if line.get("job") == "mnist"]
    assert {(line["namespace"], line["attempt"]) for line in about} == {(jobs.namespace, 1)}


def test_watch_events_alone_update_the_status(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit(numNodes=2)
    pods = jobs.wait_for_pods(2)
    for pod in pods:
        jobs.run(pod)
    running = jobs.wait_for("Running", nodesReady="2/2")
    assert running["world"]["worldSize"] == 2
    jobs.end(pods[1], 0)
    jobs.wait_for("Running", succeededNodes=[1])
    jobs.end(pods[0], 0)
    done = jobs.wait_for("Succeeded", succeededNodes=[0, 1])
    assert done["completionTime"] >= done["startTime"]
    assert jobs.condition("Finished")["status"] == "True"
    assert len(jobs.pods()) == 2, "ended pods stay, with their logs"
    uid = jobs.get()["metadata"]["uid"]

    def reasons() -> list[str]:
        events = [event for event in jobs.objects("events") if event["involvedObject"].get("uid") == uid]
        return [event["reason"] for event in sorted(events, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    eventually("the last event", lambda: "Succeeded" in reasons())
    assert reasons() == ["Started", "Running", "Succeeded"]


def test_service_of_a_running_job_is_restored_at_once(operator: OperatorProcess, jobs: Jobs) -> None:
    job = jobs.submit()
    (pod,) = jobs.wait_for_pods(1)
    jobs.run(pod)
    jobs.wait_for("Running")
    path = f"/api/v1/namespaces/{jobs.namespace}/services/{names.service_name('mnist', job['metadata']['uid'])}"
    whole = jobs.plane.request("GET", path)["spec"]

    def is_whole() -> bool:
        services = {service["metadata"]["name"]: service["spec"] for service in jobs.objects("services")}
        spec = services.get(path.rpartition("/")[2], {})
        return all(spec.get(key) == value for key, value in whole.items())

    jobs.plane.request("PATCH", path, {"spec": {"selector": {"app": "web"}, "publishNotReadyAddresses": False}})
    eventually("the selector is restored", is_whole)
    ports = [{"name": "rendezvous", "port": 80, "targetPort": 80}]
    jobs.plane.request("PATCH", path, {"spec": {"ports": ports}})
    eventually("the port is restored", is_whole)
    jobs.plane.request("PATCH", path, {"spec": {"type": "ExternalName", "externalName": "elsewhere.example"}})
    eventually("the type is restored", is_whole)
    jobs.plane.request("DELETE", path)
    eventually("the Service is created again", is_whole)
    assert jobs.wait_for("Running")["attempt"] == 1


def writes_of_the_start(jobs: Jobs) -> int:
    """Submit a job of two nodes, and return the number of the operator's writes when no other follows."""
    jobs.submit(numNodes=2)
    eventually("all is created", lambda: (jobs.status().get("currentAttempt") or {}).get("phase") == "Running")
    jobs.settle()
    return len(jobs.writes(about="mnist"))


def assert_nothing_written(jobs: Jobs, since: int) -> None:
    """Assert that the operator changed nothing.

    Pods and jobs have different watches. If the end of a pod is seen before the deletion of its job, a status is sent,
    which is refused because it names the version before the deletion. Nothing follows from a decision without a record.
    """
    refused = [("patch", "ddpjobs/status", "mnist", code) for code in (404, 409)]
    assert [write for write in jobs.writes(about="mnist", since=since) if write not in refused] == []


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_deleted_job_is_left_to_the_garbage_collector(operator: OperatorProcess, jobs: Jobs, propagation: str) -> None:
    """In the foreground it exists until the garbage collector has deleted its pods; then its finalizer is removed."""
    writes = writes_of_the_start(jobs)
    jobs.plane.request("DELETE", f"{jobs.path}/mnist", {"propagationPolicy": propagation})
    for pod in jobs.pods():
        jobs.delete(pod)
    jobs.settle()
    assert not jobs.pods()
    assert_nothing_written(jobs, writes)
    if propagation == "Foreground":
        assert jobs.get()["metadata"]["finalizers"] == ["foregroundDeletion"]
        jobs.plane.request("PATCH", f"{jobs.path}/mnist", {"metadata": {"finalizers": None}})
    jobs.submit()
    jobs.wait_for_pods(1)


@pytest.mark.parametrize("mode", ["", "--server-side"])
def test_job_that_is_applied_again_is_not_touched(operator: OperatorProcess, jobs: Jobs, mode: str) -> None:
    meta = {"name": "mnist", "namespace": jobs.namespace}
    spec = {"image": "i", "numNodes": 2, "template": {"spec": {"affinity": {"nodeAffinity": {}}}}}
    body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": meta, "spec": spec}
    options = [option for option in (mode, "-f", "-") if option]
    jobs.plane.kubectl("apply", *options, input=json.dumps(body))
    jobs.wait_for("Pending", nodes={"desired": 2, "pending": 2, "running": 0, "succeeded": 0, "failed": 0})
    before, writes = jobs.get(), len(jobs.writes(about="mnist"))
    jobs.plane.kubectl("apply", *options, input=json.dumps(body))
    jobs.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(body))
    jobs.settle()
    after = jobs.get()
    assert (after["spec"], after["status"]) == (before["spec"], before["status"])
    assert after["metadata"]["generation"] == 1 and jobs.writes(about="mnist", since=writes) == []
