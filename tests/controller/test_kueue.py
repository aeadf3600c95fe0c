"""The operator with Kueue's API on a real API server: admission, restart, preemption, and another operator."""

from collections.abc import Iterator

import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import LOOKUP_SECONDS
from tests import queues
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.queues import Queue
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy, a_third_fails

pytestmark = pytest.mark.apiserver
POOL = {"pool": queues.FLAVOR}


def submit(jobs: Jobs, name: str, **labels: str) -> None:
    """Apply a job of two nodes in the queue."""
    metadata = {"name": name, "labels": {names.LABEL_QUEUE: "research"} | labels}
    body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata}
    jobs.plane.request("POST", jobs.path, body | {"spec": {"image": "trainer:1", "numNodes": 2}})


def waits(jobs: Jobs, name: str, reason: str) -> bool:
    return jobs.status(name).get("state") == "Queued" and jobs.condition("Running", name)["reason"] == reason


def written(jobs: Jobs, *, since: int = 0) -> list[tuple[str, str]]:
    """Return verb and resource of the operator's writes to Workloads."""
    return [(verb, kind) for verb, kind, _, _ in jobs.writes(since=since) if kind.startswith("workloads")]


def run_all(jobs: Jobs, name: str, attempt: int) -> list[Json]:
    # Of a flavor whose reads all fail, the next one follows after LOOKUP_SECONDS.
    pods = jobs.wait_for_pods(2, name, attempt, timeout=60 + 2 * LOOKUP_SECONDS)
    for pod in pods:
        jobs.run(pod)
    jobs.wait_for("Running", name)
    return pods


@pytest.fixture
def without_kueue(control_plane: ControlPlane) -> Iterator[None]:
    """Remove the kinds of Kueue at the end, which the test installs."""
    yield
    queues.uninstall(control_plane)


def test_jobs_share_a_quota_keep_it_over_restarts_and_give_way_to_a_higher_priority(
    control_plane: ControlPlane, namespace: str, jobs: Jobs, without_kueue: None
) -> None:
    queue = Queue(control_plane, namespace, quota=2)
    settings: Json = {"kueue": True, "sweep_interval_seconds": 5}
    with OperatorProcess(control_plane, namespace, **settings) as operator:
        submit(jobs, "low")
        eventually("the job waits for Kueue", lambda: waits(jobs, "low", "QueueUnavailable"))
        queues.install(control_plane)
        eventually("the Workload exists", lambda: queue.of("low"))
        eventually("the job waits for quota", lambda: waits(jobs, "low", "WaitingForQuota"))
        assert not jobs.pods("low")
        queue.cycle()
        first = run_all(jobs, "low", 1)
        assert all(pod["spec"]["nodeSelector"] == POOL for pod in first)
        eventually("PodsReady is written", lambda: queue.condition("low", "PodsReady") == ("True", "Started"))

        jobs.settle()  # the API server records a write after its response
        count = len(jobs.writes())
        jobs.end(first[1], 1)
        run_all(jobs, "low", 2)
        eventually("it recovered", lambda: queue.condition("low", "PodsReady") == ("True", "Recovered"))
        jobs.settle()
        assert written(jobs, since=count) == [("patch", "workloads/status")] * 2

        count = len(jobs.writes())
        operator.stop()
        operator.start()
        submit(jobs, "urgent", **{names.LABEL_QUEUE_PRIORITY: queues.CLASS})
        eventually("it is in the queue", lambda: queue.of("urgent").get("spec", {}).get("priority") == 100)
        queue.cycle()
        assert queue.condition("low", "Evicted") == ("True", "Preempted")
        eventually("the quota is released", lambda: "admission" not in queue.of("low")["status"])
        assert (queue.condition("low", "QuotaReserved"), queue.condition("low", "Requeued")) == (
            ("False", "Pending"),
            ("True", "Preempted"),
        )
        eventually("it waits again", lambda: waits(jobs, "low", "WaitingForQuota"))
        queue.cycle()
        for pod in run_all(jobs, "urgent", 1):
            jobs.end(pod, 0)
        jobs.wait_for("Succeeded", "urgent")
        eventually("the end is written", lambda: queue.condition("urgent", "Finished") == ("True", "Succeeded"))
        queue.cycle()
        for pod in run_all(jobs, "low", 3):
            jobs.end(pod, 0)
        status = jobs.wait_for("Succeeded", "low")
        assert status["restarts"] == 1, "the preemption counts as none"
        assert written(jobs, since=count).count(("create", "workloads")) == 1
        refused = [write for write in jobs.writes() if write[3] >= 400 and write[1].startswith("workloads")]
        assert all(code in (404, 409) for _, _, _, code in refused), refused


def is_about_the_workload(request: web.BaseRequest) -> Fault | None:
    """What a webhook of Kueue that is away answers to each request for the Workload."""
    return Fault(status=500) if "/workloads/sized" in request.path else None


def test_an_outage_of_kueue_stops_no_job_that_it_has_admitted(
    control_plane: ControlPlane, namespace: str, jobs: Jobs, proxy: FaultProxy, without_kueue: None
) -> None:
    queues.install(control_plane)
    queue = Queue(control_plane, namespace, quota=2)
    with OperatorProcess(control_plane, namespace, server=proxy.server, name="operator-of-a-queue", kueue=True):
        submit(jobs, "sized")
        eventually("the job waits for quota", lambda: waits(jobs, "sized", "WaitingForQuota"))
        before = len(proxy.seen)
        queue.cycle()
        pods = run_all(jobs, "sized", 1)
        # Without watches and LISTs, because a sweep may begin at any time, and without events, which delay nothing.
        sent = [seen for seen in proxy.seen[before:] if seen.method != "GET" or "?" not in seen.path]
        sent = [seen for seen in sent if "/events" not in seen.path]
        after = [f"{seen.method} {seen.path}" for seen in sent]
        # A write of the status that was begun before the admission may still come.
        after = after[next((number for number, text in enumerate(after) if "/resourceflavors/" in text), 0) :]
        first = next(number for number, text in enumerate(after) if text.startswith("POST") and "/pods" in text)
        assert first <= 1, f"more than one request, for the flavor, between admission and pods: {after[: first + 1]}"
        eventually("PodsReady is written", lambda: queue.condition("sized", "PodsReady")[0] == "True")
        proxy.rule = is_about_the_workload
        jobs.end(pods[1], 1)
        for pod in jobs.wait_for_pods(2, "sized", 2):
            jobs.run(pod)
            jobs.end(pod, 0)
        jobs.wait_for("Succeeded", "sized")


def test_random_faults_change_nothing_in_the_life_of_a_job_in_a_queue(
    control_plane: ControlPlane, namespace: str, jobs: Jobs, proxy: FaultProxy, without_kueue: None
) -> None:
    """A third of all requests is refused, lost, throttled, or carried out without an answer."""
    queues.install(control_plane)
    queue = Queue(control_plane, namespace, quota=2)
    with OperatorProcess(
        control_plane, namespace, server=proxy.server, name="operator-of-faults", kueue=True
    ) as operator:
        proxy.rule = a_third_fails(20261126)
        submit(jobs, "faulty")
        eventually("the Workload exists", lambda: queue.of("faulty"))
        queue.cycle()
        first = run_all(jobs, "faulty", 1)
        assert all(pod["spec"]["nodeSelector"] == POOL for pod in first)
        jobs.end(first[1], 1)
        run_all(jobs, "faulty", 2)
        eventually("it recovered", lambda: queue.condition("faulty", "PodsReady")[0] == "True")
        queue.preempt("faulty")
        eventually("the quota is released", lambda: "admission" not in queue.of("faulty")["status"])
        assert queue.condition("faulty", "Requeued") == ("True", "Preempted")
        queue.cycle()
        for pod in run_all(jobs, "faulty", 3):
            jobs.end(pod, 0)
        status = jobs.wait_for("Succeeded", "faulty")
        eventually("the end is written", lambda: queue.condition("faulty", "Finished") == ("True", "Succeeded"))
        assert (status["restarts"], len(queue.workloads())) == (1, 1)
        assert operator.metric("ddpjob_reconcile_errors_total") == 0, operator.text()
