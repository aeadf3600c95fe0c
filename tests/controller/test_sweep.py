"""What the sweep selects: the objects with this operator's own labels, and no others."""

from collections.abc import AsyncIterator, Mapping

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.controller.cache import Cache
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.sweep import Sweeper
from ddpjob.engine.desired import Job, desired_claim, desired_pods, desired_service
from tests.api.specs import CLAIM
from tests.builders import SETTINGS, a_job

SPECS: Mapping[Resource, Json] = {
    names.PODS: {"containers": [{"name": "trainer", "image": "i"}]},
    names.SERVICES: {"clusterIP": "None", "selector": {"a": "b"}},
    names.CLAIMS: CLAIM["spec"],
}
OTHERS = {names.LABEL_MANAGED_BY: names.MANAGED_BY}  # any operator may set this value


@pytest.fixture
async def cluster() -> AsyncIterator[MemoryCluster]:
    yield MemoryCluster()


async def swept(cluster: MemoryCluster, cache: Cache) -> Cache:
    sweeper = Sweeper(cluster=cluster, cache=cache, scopes=[None], interval=60, metrics=Metrics())
    await sweeper.sweep()
    return cache


async def create(cluster: MemoryCluster, resource: Resource, name: str, labels: Mapping[str, str]) -> None:
    meta = {"name": name, "labels": dict(labels)}
    body = {"apiVersion": "v1", "kind": resource.kind, "metadata": meta, "spec": SPECS[resource]}
    await cluster.create(resource, "default", body)


@pytest.mark.parametrize("resource", SPECS, ids=lambda resource: resource.kind)
async def test_objects_of_another_operator_with_the_same_managed_by_are_not_seen(
    cluster: MemoryCluster, resource: Resource
) -> None:
    await create(cluster, resource, "other", OTHERS)
    await create(cluster, resource, "ours", {names.SELECTORS[resource]: "x"})
    cache = await swept(cluster, Cache())
    assert cache.get(resource, "default", "ours") and cache.get(resource, "default", "other") is None


async def test_every_created_object_has_the_label_of_its_selector(cluster: MemoryCluster) -> None:
    job = Job.of(a_job(checkpoint={"claimTemplate": CLAIM}))
    claim = desired_claim(job)
    assert claim is not None
    creates = [desired_service(job), claim, *desired_pods(job, 1, SETTINGS)]
    for made in creates:
        body = made.body | {"metadata": made.body["metadata"] | {"ownerReferences": []}}
        await cluster.create(made.resource, "default", body)
    cache = await swept(cluster, Cache())
    for made in creates:
        assert cache.get(made.resource, "default", made.name), made.name
