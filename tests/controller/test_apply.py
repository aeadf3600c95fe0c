"""Creates, deletes and changes of objects that exist, conflict or were replaced."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Change, Create, Delete, Plan
from ddpjob_operator.controller.apply import Executor, Outcome
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.sweep import Sweeper
from tests.api.specs import CLAIM
from tests.worlds.memory.api_errors import Cause, invalid
from tests.worlds.memory.faulty import Call, FaultyCluster


class Bench:
    """An executor with its cluster and cache, for one job without an operator."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.cluster = FaultyCluster(self.calls.append)
        self.server = self.cluster.server
        self.cache = Cache()
        self.executor = Executor(self.cluster, self.cache, 8)
        self.job = self.submit("mnist")

    def submit(self, name: str) -> Json:
        body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": {"name": name}}
        return self.server.create(names.DDPJOBS, "default", body | {"spec": {"image": "i"}})

    def pod(self, name: str, *, job: Json | None = None, **metadata: Any) -> Json:
        """Return a pod, by default of the job."""
        owner = (job or self.job)["metadata"]
        reference = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "controller": True}
        labels = {names.LABEL_JOB_UID: owner["uid"], names.LABEL_ATTEMPT: "1"}
        meta = {"name": name, "labels": labels} | metadata
        meta["ownerReferences"] = [reference | {"name": owner["name"], "uid": owner["uid"]}]
        spec = {"containers": [{"name": "trainer", "image": "trainer:1"}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}

    async def act(self, **plan: Any) -> Outcome:
        return await self.executor.act(self.job, Plan(**plan))

    async def create(self, *bodies: Json, **plan: Any) -> Outcome:
        phase = tuple(Create(names.PODS, body["metadata"]["name"], body) for body in bodies)
        return await self.act(creates=(phase,), **plan)

    def get(self, name: str) -> Json:
        return self.server.get(names.PODS, "default", name)

    def cached(self) -> list[str]:
        return sorted(pod.name for pod in self.cache.pods("default", self.job["metadata"]["uid"]))


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_existing_pod_of_the_job_is_adopted(bench: Bench) -> None:
    bench.server.create(names.PODS, "default", bench.pod("a"))
    assert await bench.create(bench.pod("a"), bench.pod("b")) == Outcome(created={"a", "b"})
    assert bench.cached() == ["a", "b"]


async def test_name_of_a_terminating_pod_is_reported(bench: Bench) -> None:
    pod = bench.server.create(names.PODS, "default", bench.pod("a", finalizers=["ddpjob.dev/test"]))
    await bench.act(deletes=(Delete(names.PODS, "a", pod["metadata"]["uid"]),))
    (problem,) = (await bench.create(bench.pod("a"), bench.pod("b"))).problems
    assert (problem.reason, problem.name) == ("NameTerminating", "a")
    assert bench.get("a")["metadata"]["uid"] == pod["metadata"]["uid"]


async def test_pod_of_another_job_is_a_conflict(bench: Bench) -> None:
    bench.server.create(names.PODS, "default", bench.pod("a", job=bench.submit("other")))
    (problem,) = (await bench.create(bench.pod("a"))).problems
    assert (problem.reason, problem.name) == ("NameConflict", "a")
    assert "does not belong to this DDPJob" in problem.message
    assert bench.cached() == []


async def test_first_retry_after_a_refusal_creates_one_object(bench: Bench) -> None:
    def refuse(resource: names.Resource, obj: Json) -> None:
        if obj["metadata"]["name"] == "a":
            raise invalid(resource, "a", [Cause("spec.containers[0].image", "Required value")])

    bench.server.mutate = refuse
    (problem,) = (await bench.create(*map(bench.pod, "abcd"), cautious=True)).problems
    assert (problem.reason, problem.name) == ("CreateRefused", "a")
    assert "spec.containers[0].image" in problem.message
    assert [call.name for call in bench.calls] == ["a"]


async def test_delete_of_a_missing_or_replaced_object_succeeds(bench: Bench) -> None:
    first = bench.server.create(names.PODS, "default", bench.pod("a"))
    bench.cache.put(names.PODS, first)
    bench.server.delete(names.PODS, "default", "a", grace_seconds=0)
    second = bench.server.create(names.PODS, "default", bench.pod("a"))
    deletes = Delete(names.PODS, "a", first["metadata"]["uid"]), Delete(names.PODS, "b", "of-no-pod")
    assert await bench.act(deletes=deletes) == Outcome()
    assert bench.get("a")["metadata"]["uid"] == second["metadata"]["uid"]
    assert bench.cached() == []


async def test_change_leaves_another_object_of_the_name_alone(bench: Bench) -> None:
    async def change(name: str, uid: str) -> Outcome:
        return await bench.act(changes=(Change(names.PODS, name, uid, {"activeDeadlineSeconds": 1}),))

    pod = bench.server.create(names.PODS, "default", bench.pod("a"))
    (problem,) = (await change("a", "of-another-pod")).problems
    assert (problem.reason, problem.name) == ("ChangeRefused", "a")
    assert await change("b", pod["metadata"]["uid"]) == Outcome()
    assert "activeDeadlineSeconds" not in bench.get("a")["spec"]
    assert await change("a", pod["metadata"]["uid"]) == Outcome()
    assert bench.get("a")["spec"]["activeDeadlineSeconds"] == 1


async def test_annotations_of_a_pod_are_changed_and_nothing_else(bench: Bench) -> None:
    pod = bench.server.create(names.PODS, "default", bench.pod("a", annotations={"mine": "1"}))
    change = Change(names.PODS, "a", pod["metadata"]["uid"], {}, annotations={names.ANNOTATION_HELD: "42%"})
    assert await bench.act(changes=(change,)) == Outcome()
    left = bench.get("a")
    assert left["metadata"]["annotations"] == {"mine": "1", names.ANNOTATION_HELD: "42%"}
    assert left["spec"] == pod["spec"]


async def test_sweep_keeps_an_adopted_claim_of_the_user_cached(bench: Bench) -> None:
    claim = ("default", "mnist-checkpoints")
    meta = {"metadata": {"name": claim[1], "labels": {names.LABEL_JOB_NAME: "mnist"}}}
    body = {"apiVersion": "v1", "kind": names.CLAIMS.kind} | meta | {"spec": CLAIM["spec"]}
    bench.server.create(names.CLAIMS, "default", body)
    assert await bench.act(creates=((Create(names.CLAIMS, claim[1], body, shared=True),),)) == Outcome(
        created={claim[1]}
    )
    sweeper = Sweeper(cluster=bench.cluster, cache=bench.cache, scopes=["default"], interval=60)
    await sweeper.sweep("default")
    assert bench.cache.get(names.CLAIMS, *claim)
    bench.server.delete(names.CLAIMS, *claim)
    await sweeper.sweep("default")
    assert bench.cache.get(names.CLAIMS, *claim) is None
