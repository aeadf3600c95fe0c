"""The in-memory cluster and a real API server with its controllers give the same responses to the same requests."""

import json
from functools import partial

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import ClusterError, NamespaceTerminating, NotFound
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.processes import eventually
from tests.soak import ALL
from tests.worlds.client import list_all
from tests.worlds.contract.bodies import claim, job, pod, service
from tests.worlds.contract.comparison import Side, difference
from tests.worlds.contract.conftest import Contract
from tests.worlds.contract.requests import TABLE, Request, random_sequence
from tests.worlds.control_plane import ApiError
from tests.worlds.memory import MemoryCluster

pytestmark = pytest.mark.apiserver
Cluster = MemoryCluster | KubernetesCluster


@pytest.mark.parametrize("sequence", TABLE.values(), ids=TABLE.keys())
def test_both_clusters_give_the_same_responses_to_the_table(contract: Contract, sequence: list[Request]) -> None:
    contract.run(contract.comparison.run(sequence))


@pytest.mark.parametrize("seed", range(1000 if ALL else 60))
def test_both_clusters_give_the_same_responses_to_random_requests(contract: Contract, seed: int) -> None:
    contract.run(contract.comparison.run(random_sequence(seed)))


@pytest.fixture
def clusters(contract: Contract) -> tuple[str, MemoryCluster, KubernetesCluster]:
    """Return a namespace that both clusters have, and the clusters."""
    memory = MemoryCluster(collects=False)
    memory.create_namespace(namespace := contract.comparison.new_namespace())
    return namespace, memory, contract.comparison.real


def named(body: Json, name: str, **meta: object) -> Json:
    return body | {"metadata": {"name": name} | meta}


async def change_labels(cluster: Cluster, namespace: str) -> None:
    """Make a Service match, change, no longer match, and delete it while it matches again."""
    for colour in ("red", "blue", "blue", "red", "blue"):
        labels = {"colour": colour}
        try:
            await cluster.patch(names.SERVICES, namespace, "s", {"metadata": {"labels": labels}})
        except NotFound:
            await cluster.create(names.SERVICES, namespace, named(service(), "s", labels=labels))
        await cluster.patch(names.SERVICES, namespace, "s", {"spec": {"publishNotReadyAddresses": colour == "blue"}})
    await cluster.delete(names.SERVICES, namespace, "s")


def outline(event: Json) -> str:
    obj = event["object"]
    return json.dumps([event["type"], obj["metadata"]["labels"], bool(obj["spec"].get("publishNotReadyAddresses"))])


def test_a_watch_with_a_selector_sends_the_same_events(
    contract: Contract, clusters: tuple[str, MemoryCluster, KubernetesCluster]
) -> None:
    namespace, memory, real = clusters
    since = contract.run(list_all(real, names.SERVICES, namespace)).resource_version
    watch = memory.watch(names.SERVICES, namespace, "colour=blue", resource_version=str(memory.store.version))
    for cluster in (memory, real):
        contract.run(change_labels(cluster, namespace))
    path = f"/api/v1/namespaces/{namespace}/services?labelSelector=colour%3Dblue"
    expected = [outline(event) for event in contract.plane.history(path, since)]
    assert [outline(event) for event in watch.take()] == expected and len(expected) > 4


def test_a_deleted_namespace_is_emptied_and_refuses_new_objects(
    contract: Contract, clusters: tuple[str, MemoryCluster, KubernetesCluster]
) -> None:
    namespace, memory, real = clusters
    held = named(pod(), "held", finalizers=["example.com/hold"])  # delays the others: pods are deleted first
    bodies = (named(job(), "a"), named(pod(), "a"), held, named(service(), "a"), named(claim(), "a"))
    kinds = (names.DDPJOBS, names.PODS, names.PODS, names.SERVICES, names.CLAIMS)
    for cluster in (memory, real):
        for kind, body in zip(kinds, bodies, strict=True):
            contract.run(cluster.create(kind, namespace, body))
    memory.delete_namespace(namespace)
    contract.plane.request("DELETE", f"/api/v1/namespaces/{namespace}")
    errors = []
    for cluster in (memory, real):
        with pytest.raises(NamespaceTerminating) as caught:
            contract.run(cluster.create(names.PODS, namespace, named(pod(), "late")))
        errors.append((str(caught.value), caught.value.code, caught.value.details))
    assert errors[0] == errors[1]
    sides = Side(memory, namespace), Side(real, namespace)
    for release in (False, True):
        for cluster in (memory, real) if release else ():
            contract.run(cluster.patch(names.PODS, namespace, "held", {"metadata": {"finalizers": None}}))
        memory.collect()
        left = [obj["metadata"]["name"] for obj in contract.run(sides[0].objects())]
        same = partial(lambda left: [o["metadata"]["name"] for o in contract.run(sides[1].objects())] == left, left)
        eventually(f"only {left} is left", same)
    assert not left


def test_a_pod_is_bound_once_and_not_while_it_terminates(
    contract: Contract, clusters: tuple[str, MemoryCluster, KubernetesCluster]
) -> None:
    namespace, memory, real = clusters
    for cluster in (memory, real):
        contract.run(cluster.create(names.PODS, namespace, named(pod(), "p")))

    def bind(node: str) -> str:
        body = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": node}}
        try:
            contract.plane.request("POST", f"/api/v1/namespaces/{namespace}/pods/p/binding", body)
        except ApiError as error:
            return str(error).removeprefix("HTTP 409: ")
        return ""

    def bind_in_memory(node: str) -> str:
        try:
            memory.server.bind(namespace, "p", node)
        except ClusterError as error:
            return str(error)
        return ""

    for step in (1, 2, 3):
        for cluster in (memory, real) if step == 3 else ():
            contract.run(cluster.delete(names.PODS, namespace, "p"))
        assert bind_in_memory(f"node-{step}") == bind(f"node-{step}")
        bodies = [contract.run(cluster.get(names.PODS, namespace, "p")) for cluster in (memory, real)]
        for body in bodies:
            for condition in body["status"]["conditions"]:
                assert condition.pop("lastTransitionTime")
        assert not difference(bodies[0]["spec"], bodies[1]["spec"])
        assert not difference(bodies[0]["status"], bodies[1]["status"])
        assert bodies[0]["metadata"].get("generation") == bodies[1]["metadata"].get("generation")
