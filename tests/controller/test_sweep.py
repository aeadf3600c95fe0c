"""What the sweep selects: the objects with this operator's own labels, and no others. When it is repeated."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json
from ddpjob.engine.desired import Job, desired_claim, desired_pods
from ddpjob.engine.network import desired_policy, desired_service
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, NotServed, Unavailable
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import VersionsWentBackError
from ddpjob_operator.controller.sweep import MAX_START_SECONDS, Sweeper
from tests.api.specs import CLAIM
from tests.builders import SETTINGS, a_job
from tests.controller.faketime import run as run_in_simulated_time
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

SPECS: Mapping[Resource, Json] = {
    names.PODS: {"containers": [{"name": "trainer", "image": "i"}]},
    names.SERVICES: {"clusterIP": "None", "selector": {"a": "b"}},
    names.NETWORK_POLICIES: {"podSelector": {}},
    names.CLAIMS: CLAIM["spec"],
}
OTHERS = {names.LABEL_MANAGED_BY: names.MANAGED_BY}  # any operator may set this value


@pytest.fixture
async def cluster() -> AsyncIterator[MemoryCluster]:
    yield MemoryCluster()


def a_sweeper(
    cluster: Cluster, cache: Cache, *, scopes: Sequence[str | None] = (None,), interval: float = 60.0, **others: Any
) -> Sweeper:
    return Sweeper(
        cluster=cluster,
        cache=cache,
        scopes=scopes,
        interval=interval,
        **others,
    )


async def swept(cluster: MemoryCluster, cache: Cache) -> Cache:
    sweeper = a_sweeper(cluster, cache)
    await sweeper.sweep(None)
    return cache


async def create(cluster: MemoryCluster, resource: Resource, name: str, labels: Mapping[str, str]) -> None:
    meta = {"name": name, "labels": dict(labels)}
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, "spec": SPECS[resource]}
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
    job = Job.of(a_job(checkpoint={"claimTemplate": CLAIM}, networkPolicy="Isolated"))
    claim, policy = desired_claim(job), desired_policy(job, SETTINGS)
    assert claim is not None and policy is not None
    creates = [desired_service(job), policy, claim, *desired_pods(job, 1, SETTINGS)]
    for made in creates:
        body = made.body | {"metadata": made.body["metadata"] | {"ownerReferences": []}}
        await cluster.create(made.resource, "default", body)
    cache = await swept(cluster, Cache())
    for made in creates:
        assert cache.get(made.resource, "default", made.name), made.name


async def sweep_that_finds_the_job(
    cluster: FaultyCluster, *, families: tuple[tuple[Resource, ...], ...] = ()
) -> Sweeper:
    """Create a job, sweep once, check that the job is found and the sweep has not failed, and return the sweeper."""
    sweeper = a_sweeper(cluster, Cache(), families=families)
    cluster.server.create(
        names.DDPJOBS,
        "default",
        {key: a_job()[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "mnist"}},
    )
    await sweeper.sweep(None)
    assert sweeper.cache.job(Key("default", "mnist")) and sweeper.failures == {}
    return sweeper


async def test_without_the_right_to_list_policies_everything_else_is_listed() -> None:
    forbidden = Fault(before=Forbidden("networkpolicies.networking.k8s.io is forbidden", code=403))
    cluster = FaultyCluster(lambda call: forbidden if call.resource is names.NETWORK_POLICIES else None)
    await sweep_that_finds_the_job(cluster)


@pytest.mark.parametrize("error", [Forbidden("podgroups is forbidden"), Unavailable("conversion webhook"), None])
async def test_a_gang_scheduler_that_cannot_be_listed_keeps_no_job_from_being_served(
    error: ClusterError | None,
) -> None:
    kind, fault = names.VOLCANO_GROUPS, Fault(before=error or NotServed("404 page not found"))
    cluster = FaultyCluster(lambda call: fault if call.verb == "list" and call.resource is kind else None)
    sweeper = await sweep_that_finds_the_job(cluster, families=((kind,),))
    assert sweeper.cache.served == (frozenset({kind.api_version}) if error else frozenset())


class BrokenLists(FaultyCluster):
    """The next LISTs of pods fail, as many as ``failing`` says; ``lists``: when pods were listed."""

    def __init__(self) -> None:
        self.failing = 0
        self.lists: list[float] = []
        super().__init__(self._hook)

    def _hook(self, call: Call) -> Fault | None:
        if call.verb != "list" or call.resource is not names.PODS:
            return None
        self.lists.append(asyncio.get_running_loop().time())
        self.failing -= 1
        return (
            Fault(before=Unavailable("list Pod: etcdserver: leader changed", code=500)) if self.failing >= 0 else None
        )


def gaps_after_a_wanted_sweep(*, failing: int, seconds: float) -> list[float]:
    """Return the seconds between the sweeps from one that is wanted at time 0 and whose first tries fail."""

    async def scenario() -> list[float]:
        cluster = BrokenLists()
        sweeper = a_sweeper(cluster, Cache(), interval=600)
        task = asyncio.create_task(sweeper.run())
        await sweeper.filled(None)
        cluster.lists.clear()
        cluster.failing = failing
        sweeper.want()
        await asyncio.sleep(seconds)
        task.cancel()
        return [later - earlier for earlier, later in itertools.pairwise([0.0, *cluster.lists])]

    return run_in_simulated_time(scenario())


def test_a_sweep_that_failed_is_repeated_soon() -> None:
    assert gaps_after_a_wanted_sweep(failing=1, seconds=300) == pytest.approx([1.0, 0.5])


def test_a_sweep_that_fails_again_and_again_is_repeated_ever_less_often() -> None:
    gaps = gaps_after_a_wanted_sweep(failing=1000, seconds=20_000)
    assert gaps[:6] == pytest.approx([1.0, 0.5, 1.0, 2.0, 4.0, 8.0])
    assert gaps[6:] == pytest.approx([16.0, 32.0, 64.0, 128.0, 256.0, 512.0] + [600.0] * (len(gaps) - 12))


class LostNamespace(FaultyCluster):
    """Requests of one namespace are refused while ``is_lost``."""

    def __init__(self, namespace: str) -> None:
        self.is_lost = True
        super().__init__(lambda call: self._refusal if self.is_lost and call.namespace == namespace else None)

    _refusal = Fault(before=Forbidden("list Pod: no Role", code=403))


def test_lost_namespace_delays_no_other_and_is_listed_once_it_is_back() -> None:
    async def scenario() -> None:
        cluster = LostNamespace("lost")
        cache = Cache()
        scopes = ["lost", "kept"]
        sweeper = a_sweeper(cluster, cache, scopes=scopes)
        task = asyncio.create_task(sweeper.run())
        await asyncio.wait_for(sweeper.filled("kept"), 1)
        assert "no Role" in sweeper.failures["lost"] and "kept" not in sweeper.failures
        for namespace in scopes:
            cluster.server.namespaces.add(namespace)
            claim = {"metadata": {"name": "new", "labels": {names.SELECTORS[names.CLAIMS]: "x"}}, "spec": CLAIM["spec"]}
            cluster.server.create(names.CLAIMS, namespace, {"apiVersion": "v1", "kind": names.CLAIMS.kind} | claim)
        await asyncio.sleep(130)
        assert cache.get(names.CLAIMS, "kept", "new") and cache.get(names.CLAIMS, "lost", "new") is None
        cluster.is_lost = False
        await asyncio.wait_for(sweeper.filled("lost"), MAX_START_SECONDS)
        assert cache.get(names.CLAIMS, "lost", "new") and sweeper.failures == {}
        task.cancel()

    run_in_simulated_time(scenario())


def test_sweep_after_versions_went_back_ends() -> None:
    """The process then begins again, with an empty cache."""

    async def scenario() -> None:
        cache = Cache()
        sweeper = a_sweeper(MemoryCluster(), cache, scopes=["a", "b"])
        cache.put(names.SERVICES, {"metadata": {"name": "x", "namespace": "a", "uid": "u", "resourceVersion": "999"}})
        with pytest.raises(VersionsWentBackError):
            await sweeper.run()

    run_in_simulated_time(scenario())
