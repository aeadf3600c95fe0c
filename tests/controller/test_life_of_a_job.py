"""The operator as a process with a real API server: a job from apply to its end."""

import json

import pytest

from ddpjob.api import names
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane

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


def test_failed_pod_restarts_the_group_after_the_decision_is_written(operator: OperatorProcess, jobs: Jobs) -> None:
    since = jobs.submit(numNodes=2)["metadata"]["resourceVersion"]
    first = jobs.wait_for_pods(2)
    for pod in first:
        jobs.run(pod)
    jobs.wait_for("Running")
    jobs.end(first[1], 1)
    second = jobs.wait_for_pods(2, attempt=2)
    status = jobs.status()
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsLimit"]) == (2, 1, 1)
    assert status["failures"][0]["nodeRank"] == 1
    survivor, failed = first
    assert eventually("the survivor is gone", lambda: [p["metadata"]["name"] for p in jobs.pods(attempt=1)]) == [
        failed["metadata"]["name"]
    ]

    history = jobs.plane.history(jobs.path, since)
    decided = min(version(event) for event in history if event["object"].get("status", {}).get("attempt") == 2)
    pod_history = jobs.plane.history(f"/api/v1/namespaces/{jobs.namespace}/pods", since)
    gone = [
        version(event)
        for event in pod_history
        if event["type"] == "DELETED" and event["object"]["metadata"]["name"] == survivor["metadata"]["name"]
    ]
    assert gone, pod_history
    assert decided < min(gone)
    assert decided < min(int(pod["metadata"]["resourceVersion"]) for pod in second)


def version(event: dict[str, dict[str, dict[str, str]]]) -> int:
    return int(event["object"]["metadata"]["resourceVersion"])


def test_job_without_restarts_left_fails_and_stops_all_pods(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit(numNodes=2, restartPolicy={"maxRestarts": 0})
    pods = jobs.wait_for_pods(2)
    for pod in pods:
        jobs.run(pod)
    jobs.wait_for("Running")
    jobs.end(pods[0], 1)
    jobs.wait_for("Failed")
    eventually("the peer is gone", lambda: len(jobs.pods()) == 1)
    jobs.settle()
    assert len(jobs.pods()) == 1


def test_many_pods_starting_at_once_need_few_status_patches(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit(numNodes=16)
    pods = jobs.wait_for_pods(16)
    jobs.wait_for("Pending", nodes={"desired": 16, "pending": 16, "running": 0, "succeeded": 0, "failed": 0})
    before = len(jobs.writes(about="mnist"))
    for pod in pods:
        jobs.run(pod)
    jobs.wait_for("Running", nodesReady="16/16")
    patches = [write for write in jobs.writes(about="mnist", since=before) if write[1] == "ddpjobs/status"]
    assert len(patches) < 16, patches


def test_finished_job_is_deleted_after_its_ttl(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit(ttlSecondsAfterFinished=1)
    (pod,) = jobs.wait_for_pods(1)
    jobs.end(pod, 0)
    eventually("the job is gone", lambda: not jobs.exists())


def writes_of_the_start(jobs: Jobs) -> int:
    """Submit a job of two nodes, and return the number of the operator's writes when no other follows."""
    jobs.submit(numNodes=2)
    eventually("all is created", lambda: (jobs.status().get("currentAttempt") or {}).get("phase") == "Running")
    jobs.settle()
    return len(jobs.writes(about="mnist"))


def test_deleted_job_is_left_to_the_garbage_collector(operator: OperatorProcess, jobs: Jobs) -> None:
    writes = writes_of_the_start(jobs)
    jobs.plane.request("DELETE", f"{jobs.path}/mnist")
    for pod in jobs.pods():
        jobs.delete(pod)
    jobs.settle()
    assert_nothing_written(jobs, writes)


def assert_nothing_written(jobs: Jobs, since: int) -> None:
    """Assert that the operator changed nothing.

    Pods and jobs have different watches. If the end of a pod is seen before the deletion of its job, a status is sent,
    which is refused because it names the version before the deletion. Nothing follows from a decision without a record.
    """
    refused = [("patch", "ddpjobs/status", "mnist", code) for code in (404, 409)]
    assert [write for write in jobs.writes(about="mnist", since=since) if write not in refused] == []


def test_job_that_is_deleted_in_the_foreground_gets_no_new_pods(operator: OperatorProcess, jobs: Jobs) -> None:
    """The job exists until the garbage collector has deleted its pods; then its finalizer is removed."""
    writes = writes_of_the_start(jobs)
    jobs.plane.request("DELETE", f"{jobs.path}/mnist", {"propagationPolicy": "Foreground"})
    assert jobs.get()["metadata"]["finalizers"] == ["foregroundDeletion"]
    for pod in jobs.pods():
        jobs.delete(pod)
    jobs.settle()
    assert jobs.exists() and not jobs.pods()
    assert_nothing_written(jobs, writes)
    jobs.plane.request("PATCH", f"{jobs.path}/mnist", {"metadata": {"finalizers": None}})
    jobs.submit()
    jobs.wait_for_pods(1)


def test_unbound_claim_of_a_pending_job_is_named_with_its_event(operator: OperatorProcess, jobs: Jobs) -> None:
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    jobs.submit(checkpoint={"claimTemplate": claim})
    (pod,) = jobs.wait_for_pods(1)
    (found,) = jobs.objects("persistentvolumeclaims")
    meta = found["metadata"]
    about = {"kind": "PersistentVolumeClaim", "namespace": jobs.namespace, "name": meta["name"], "uid": meta["uid"]}
    event = {"metadata": {"name": "why"}, "involvedObject": about, "type": "Warning", "reason": "ProvisioningFailed"}
    jobs.plane.request("POST", f"/api/v1/namespaces/{jobs.namespace}/events", event | {"message": "no such class"})
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "unbound claims"}
    status = {"phase": "Pending", "conditions": [unbound]}
    jobs.plane.request("PATCH", f"{jobs.object_path(pod)}/status", {"status": status})
    why = "unbound claims; claim mnist-checkpoints is Pending: ProvisioningFailed: no such class"
    eventually("the message quotes the event", lambda: why in jobs.condition("Scheduled").get("message", ""))


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


def test_a_job_of_another_namespace_is_not_touched(
    operator: OperatorProcess, jobs: Jobs, control_plane: ControlPlane
) -> None:
    control_plane.make_namespace(f"{jobs.namespace}-other")
    other = Jobs(control_plane, f"{jobs.namespace}-other")
    other.submit()
    jobs.settle()
    assert other.status() == {}
    assert other.writes() == []


def test_each_transition_has_one_event(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit()
    (pod,) = jobs.wait_for_pods(1)
    jobs.run(pod)
    jobs.wait_for("Running")
    jobs.end(pod, 0)
    jobs.wait_for("Succeeded")
    uid = jobs.get()["metadata"]["uid"]

    def reasons() -> list[str]:
        events = [event for event in jobs.objects("events") if event["involvedObject"].get("uid") == uid]
        return [event["reason"] for event in sorted(events, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    eventually("the last event", lambda: "Succeeded" in reasons())
    assert reasons() == ["Started", "Running", "Succeeded"]


def test_log_lines_are_json_and_name_the_job_and_its_attempt(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit()
    jobs.settle()
    text = operator.text().splitlines()
    assert len(operator.lines()) == len(text), [line for line in text if not line.startswith("{")]
    about = [line for line in operator.lines() if line.get("job") == "mnist"]
    assert about
    assert {(line["namespace"], line["attempt"]) for line in about} == {(jobs.namespace, 1)}


def test_the_metrics_count_jobs_and_requests(operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.submit()
    jobs.wait_for("Pending", nodes={"desired": 1, "pending": 1, "running": 0, "succeeded": 0, "failed": 0})
    assert operator.metric("ddpjob_jobs", state="Pending") == 1
    assert operator.metric("ddpjob_api_request_duration_seconds_count", verb="create", kind="Pod", code="201") == 1
    assert operator.metric("ddpjob_reconcile_duration_seconds_count", result="done") >= 1
    assert operator.metric("ddpjob_reconcile_errors_total") == 0
    assert 0 <= operator.metric("ddpjob_watch_age_seconds", path=jobs.path) < 90
