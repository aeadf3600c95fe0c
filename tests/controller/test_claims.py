"""An existing claim with the name of the job's own: adopted with an event, or a name conflict and no pods."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from ddpjob_operator.cluster.base import Cluster, NotFound
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.api.specs import CLAIM
from tests.controller.controllers import a_controller, serve
from tests.worlds.client import list_all
from tests.worlds.memory import MemoryCluster

CLAIM_NAME = "mnist-checkpoints"


class Place:
    """A namespace with a running controller."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    async def claim(self, *, label: str = "", **spec: Any) -> Json:
        labels = {names.LABEL_JOB_NAME: label} if label else {}
        meta = {"name": CLAIM_NAME, "labels": labels}
        body = {"apiVersion": "v1", "kind": names.CLAIMS.kind, "metadata": meta, "spec": CLAIM["spec"] | spec}
        return await self.cluster.create(names.CLAIMS, self.namespace, body)

    async def submit(self) -> None:
        spec = {"image": "i", "numNodes": 2, "checkpoint": {"claimTemplate": CLAIM}}
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.DDPJOBS.kind,
            "metadata": {"name": "mnist"},
            "spec": spec,
        }
        await self.cluster.create(names.DDPJOBS, self.namespace, body)

    async def pods(self) -> list[Json]:
        return list((await list_all(self.cluster, names.PODS, self.namespace)).items)

    async def stalled(self) -> Json:
        job = await self.cluster.get(names.DDPJOBS, self.namespace, "mnist")
        return condition(job.get("status"), "Stalled")

    async def events(self, reason: str) -> list[str]:
        events = (await list_all(self.cluster, names.EVENTS, self.namespace)).items
        return [event["message"] for event in events if event["reason"] == reason]


async def eventually(probe: Any, what: str) -> Any:
    for _ in range(300):
        if found := await probe():
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(what)


@pytest.fixture(params=["memory", pytest.param("apiserver", marks=pytest.mark.apiserver)])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    if request.param == "memory":
        cluster = MemoryCluster()
        serving = asyncio.create_task(serve(a_controller(cluster), cluster.watch))
        yield Place(cluster, "default")
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        return
    # The operator runs as its own process there.
    request.getfixturevalue("operator")
    jobs = request.getfixturevalue("jobs")
    connection = await Connection.open(str(request.getfixturevalue("control_plane").kubeconfig()))
    real = KubernetesCluster(connection)
    yield Place(real, jobs.namespace)
    await real.close()
    await connection.close()


async def test_claim_that_does_not_fit_is_a_name_conflict_until_it_is_gone(place: Place) -> None:
    small = await place.claim(resources={"requests": {"storage": "1Mi"}})
    await place.submit()

    async def conflict() -> bool:
        return (await place.stalled()).get("reason") == "NameConflict"

    await eventually(conflict, "the job reports NameConflict")
    assert "it requests 1Mi of storage, not 1Gi" in (await place.stalled())["message"]
    assert not await place.pods() and not await place.events("ClaimAdopted")
    await place.cluster.patch(names.CLAIMS, place.namespace, CLAIM_NAME, {"metadata": {"finalizers": None}})
    with suppress(NotFound):
        await place.cluster.delete(names.CLAIMS, place.namespace, CLAIM_NAME, uid=small["metadata"]["uid"])
    await eventually(place.pods, "the pods are created once the claim is gone")
    created = await place.cluster.get(names.CLAIMS, place.namespace, CLAIM_NAME)
    assert created["metadata"]["labels"][names.LABEL_JOB_NAME] == "mnist"


async def test_claim_of_another_job_is_a_name_conflict(place: Place) -> None:
    await place.claim(label="other")
    await place.submit()

    async def conflict() -> bool:
        return (await place.stalled()).get("reason") == "NameConflict"

    await eventually(conflict, "the job reports NameConflict")
    assert "it belongs to the DDPJob other" in (await place.stalled())["message"]
    assert not await place.pods()


@pytest.mark.parametrize(
    ("label", "size", "event"),
    [("", "2Gi", "uses the claim mnist-checkpoints, which the operator did not create: 2Gi, ReadWriteMany"),
     ("mnist", "1Mi", "uses the claim mnist-checkpoints of an earlier job of this name")],
    ids=["fits", "has the label"],
)  # fmt: skip
async def test_adopted_claim_is_told_in_an_event(place: Place, label: str, size: str, event: str) -> None:
    await place.claim(label=label, resources={"requests": {"storage": size}})
    await asyncio.sleep(1.1)  # creation times have whole seconds
    await place.submit()
    assert len(await eventually(place.pods, "the pods are created")) <= 2

    async def told() -> list[str]:
        return await place.events("ClaimAdopted")

    assert await eventually(told, "the event ClaimAdopted") == [event]


async def test_own_claim_is_created_without_an_event(place: Place) -> None:
    await place.submit()

    async def told() -> list[Json]:
        return list((await list_all(place.cluster, names.EVENTS, place.namespace)).items)

    # The event of an adoption would have been sent before that of the start.
    assert [event["reason"] for event in await eventually(told, "the event of the start")] != ["ClaimAdopted"]
    assert await place.pods() and not await place.events("ClaimAdopted")
