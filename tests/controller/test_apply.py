"""Creates and deletes on the real API server: existing, conflicting and terminating objects."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Change, Create, Delete, Note, Plan
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from ddpjob_operator.controller.apply import Executor, Outcome
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.sweep import Sweeper
from ddpjob_operator.controller.workloads import Workloads
from tests.controller.jobs import Jobs
from tests.worlds.control_plane import ControlPlane

pytestmark = pytest.mark.apiserver


@dataclass
class Bench:
    """An executor with its cluster and cache, for one job without an operator."""

    cluster: KubernetesCluster
    cache: Cache
    executor: Executor
    jobs: Jobs
    job: Json

    def pod(self, name: str, *, owner: str = "", **metadata: Any) -> Json:
        """Return a pod, by default of this job."""
        reference = {
            "apiVersion": names.API_VERSION,
            "kind": names.DDPJOBS.kind,
            "name": self.job["metadata"]["name"],
            "uid": owner or self.job["metadata"]["uid"],
            "controller": True,
        }
        labels = {names.LABEL_JOB_UID: self.job["metadata"]["uid"], names.LABEL_ATTEMPT: "1"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels, "ownerReferences": [reference]} | metadata,
            "spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]},
        }

    async def create(self, *bodies: Json) -> Outcome:
        phase = tuple(Create(names.PODS, body["metadata"]["name"], body) for body in bodies)
        return await self.executor.act(self.job, Plan(creates=(phase,)))

    def cached(self) -> list[str]:
        return sorted(pod.name for pod in self.cache.pods(self.jobs.namespace, self.job["metadata"]["uid"]))


@pytest.fixture
async def bench(control_plane: ControlPlane, jobs: Jobs) -> AsyncIterator[Bench]:
    connection = await Connection.open(str(control_plane.kubeconfig()))
    cluster = KubernetesCluster(connection)
    cache = Cache()
    yield Bench(cluster, cache, Executor(cluster, cache, 8), jobs, jobs.submit())
    await cluster.close()
    await connection.close()


async def test_created_objects_are_cached_at_once(bench: Bench) -> None:
    assert await bench.create(bench.pod("a"), bench.pod("b")) == Outcome(created=frozenset("ab"))
    assert bench.cached() == ["a", "b"]


async def test_existing_pod_of_the_job_is_adopted(bench: Bench) -> None:
    await bench.cluster.create(names.PODS, bench.jobs.namespace, bench.pod("a"))
    assert await bench.create(bench.pod("a"), bench.pod("b")) == Outcome(created=frozenset("ab"))
    assert bench.cached() == ["a", "b"]


async def test_name_of_a_terminating_pod_is_reported(bench: Bench) -> None:
    held = bench.pod("a", finalizers=["ddpjob.dev/test"])
    pod = await bench.cluster.create(names.PODS, bench.jobs.namespace, held)
    await bench.executor.act(bench.job, Plan(deletes=(Delete(names.PODS, "a", pod["metadata"]["uid"]),)))
    (problem,) = (await bench.create(bench.pod("a"), bench.pod("b"))).problems
    assert (problem.reason, problem.name) == ("NameTerminating", "a")
    assert (await bench.cluster.get(names.PODS, bench.jobs.namespace, "a"))["metadata"]["uid"] == pod["metadata"]["uid"]


async def test_pod_of_a_deleted_job_of_the_same_name_is_a_conflict(bench: Bench) -> None:
    await bench.cluster.create(names.PODS, bench.jobs.namespace, bench.pod("a", owner="of-a-former-job"))
    (problem,) = (await bench.create(bench.pod("a"))).problems
    assert (problem.reason, problem.name) == ("NameConflict", "a")
    assert "does not belong to this DDPJob" in problem.message
    assert bench.cached() == []


async def test_service_of_another_owner_is_a_conflict(bench: Bench) -> None:
    spec = {"clusterIP": "None", "selector": {"of": "another"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": spec}
    await bench.cluster.create(names.SERVICES, bench.jobs.namespace, service)
    phase = (Create(names.SERVICES, "a", service), *(Create(names.PODS, n, bench.pod(n)) for n in ("a", "b")))
    (problem,) = (await bench.executor.act(bench.job, Plan(creates=(phase,)))).problems
    assert (problem.reason, problem.resource) == ("NameConflict", names.SERVICES)


async def test_refusal_keeps_the_servers_message(bench: Bench) -> None:
    wrong = bench.pod("c")
    wrong["spec"]["containers"][0]["image"] = ""
    (problem,) = (await bench.create(bench.pod("a"), bench.pod("b"), wrong)).problems
    assert (problem.reason, problem.name) == ("CreateRefused", "c")
    assert "spec.containers[0].image" in problem.message
    assert bench.cached() == sorted(pod["metadata"]["name"] for pod in bench.jobs.objects("pods"))


async def test_first_retry_after_a_refusal_creates_one_object(bench: Bench) -> None:
    bodies = [bench.pod(name) for name in "abcd"]
    bodies[0]["spec"]["containers"][0]["image"] = ""
    phase = tuple(Create(names.PODS, body["metadata"]["name"], body) for body in bodies)
    outcome = await bench.executor.act(bench.job, Plan(creates=(phase,), cautious=True))
    assert len(outcome.problems) == 1
    posts = [write for write in bench.jobs.writes() if write[:2] == ("create", "pods")]
    assert len(posts) == 1, posts


async def test_nothing_is_created_in_a_terminating_namespace(bench: Bench, control_plane: ControlPlane) -> None:
    control_plane.request("DELETE", f"/api/v1/namespaces/{bench.jobs.namespace}")
    assert await bench.create(bench.pod("a")) == Outcome(namespace_gone=True)


async def test_delete_of_a_missing_or_replaced_object_succeeds(bench: Bench) -> None:
    first = await bench.cluster.create(names.PODS, bench.jobs.namespace, bench.pod("a"))
    bench.cache.put(names.PODS, first)
    uid = first["metadata"]["uid"]
    await bench.cluster.delete(names.PODS, bench.jobs.namespace, "a", uid=uid)
    second = await bench.cluster.create(names.PODS, bench.jobs.namespace, bench.pod("a"))
    gone = Delete(names.PODS, "b", "11111111-0000-0000-0000-000000000000")
    await bench.executor.act(bench.job, Plan(deletes=(Delete(names.PODS, "a", uid), gone)))
    left = await bench.cluster.get(names.PODS, bench.jobs.namespace, "a")
    assert left["metadata"]["uid"] == second["metadata"]["uid"]
    assert bench.cached() == []


async def test_change_leaves_another_object_of_the_name_alone(bench: Bench) -> None:
    async def change(name: str, uid: str) -> Outcome:
        changes = (Change(names.PODS, name, uid, {"activeDeadlineSeconds": 1}),)
        return await bench.executor.act(bench.job, Plan(changes=changes))

    pod = await bench.cluster.create(names.PODS, bench.jobs.namespace, bench.pod("a"))
    (problem,) = (await change("a", "11111111-0000-0000-0000-000000000000")).problems
    assert (problem.reason, problem.name) == ("ChangeRefused", "a")
    assert await change("b", pod["metadata"]["uid"]) == Outcome()
    left = await bench.cluster.get(names.PODS, bench.jobs.namespace, "a")
    assert "activeDeadlineSeconds" not in left["spec"]
    assert await change("a", pod["metadata"]["uid"]) == Outcome()
    left = await bench.cluster.get(names.PODS, bench.jobs.namespace, "a")
    assert left["spec"]["activeDeadlineSeconds"] == 1


async def test_annotations_of_a_pod_are_changed_and_nothing_else(bench: Bench) -> None:
    body = bench.pod("a")
    body["metadata"]["annotations"] = {"mine": "1"}
    pod = await bench.cluster.create(names.PODS, bench.jobs.namespace, body)
    change = Change(names.PODS, "a", pod["metadata"]["uid"], {}, annotations={names.ANNOTATION_PROGRESS: "42%"})
    assert await bench.executor.act(bench.job, Plan(changes=(change,))) == Outcome()
    left = await bench.cluster.get(names.PODS, bench.jobs.namespace, "a")
    assert left["metadata"]["annotations"] == {"mine": "1", names.ANNOTATION_PROGRESS: "42%"}
    assert left["spec"] == pod["spec"]
    (view,) = bench.cache.pods(bench.jobs.namespace, bench.job["metadata"]["uid"])
    assert view.progress == "42%"


async def test_sweep_keeps_an_adopted_claim_of_the_user_cached(bench: Bench) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "mnist-checkpoints"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await bench.cluster.create(names.CLAIMS, bench.jobs.namespace, body)
    create = Create(names.CLAIMS, "mnist-checkpoints", body, shared=True)
    assert (await bench.executor.act(bench.job, Plan(creates=((create,),)))).problems == ()

    sweeper = Sweeper(
        cluster=bench.cluster,
        cache=bench.cache,
        scopes=[bench.jobs.namespace],
        interval=60,
        metrics=Metrics(),
        workloads=Workloads(bench.cluster, bench.cache, time.monotonic, uses_kueue=False),
    )
    await sweeper.sweep(bench.jobs.namespace)
    assert bench.cache.get(names.CLAIMS, bench.jobs.namespace, "mnist-checkpoints")
    claim = f"/api/v1/namespaces/{bench.jobs.namespace}/persistentvolumeclaims/mnist-checkpoints"
    bench.jobs.plane.request("PATCH", claim, {"metadata": {"finalizers": None}})
    bench.jobs.plane.request("DELETE", claim)
    await sweeper.sweep(bench.jobs.namespace)
    assert bench.cache.get(names.CLAIMS, bench.jobs.namespace, "mnist-checkpoints") is None


async def test_event_that_is_sent_twice_exists_once(bench: Bench) -> None:
    sender = EventSender(bench.cluster)
    running = asyncio.create_task(sender.run())
    for message in ("attempt 1 begins", "attempt 1 begins", "attempt 2 begins"):
        sender.send(bench.job, Note("Normal", "Started", message))
    await asyncio.wait_for(sender.flush(), 30)
    running.cancel()
    events = bench.jobs.objects("events")
    assert sorted(event["message"] for event in events) == ["attempt 1 begins", "attempt 2 begins"]
    assert {event["involvedObject"]["uid"] for event in events} == {bench.job["metadata"]["uid"]}
