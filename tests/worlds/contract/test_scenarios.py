"""Scenarios that the random requests lack: selectors of watches and fields, bindings, quantities, namespaces."""

import json
import urllib.parse
from functools import partial
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import ClusterError, Invalid, NamespaceTerminating, NotFound
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.api.test_quantities import QUANTITIES
from tests.processes import eventually
from tests.worlds.contract.bodies import claim, job, pod, service
from tests.worlds.contract.conftest import Targets
from tests.worlds.control_plane import ApiError
from tests.worlds.listing import list_all
from tests.worlds.memory import MemoryCluster

pytestmark = pytest.mark.apiserver

Cluster = MemoryCluster | KubernetesCluster

FIELD_SELECTORS = (
    *("", "metadata.name=a", "metadata.name!=a", "metadata.name==a,spec.nodeName=worker", "spec.nodeName=worker"),
    *("spec.nodeName=", "status.phase=Pending", "status.phase!=Running", "metadata.namespace=selected", "spec.foo=1"),
    *("metadata.name", "spec.restartPolicy=Always,spec.nodeName!=worker", "metadata.name=a,", "=a"),
)

UNITS = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "e3", "E-3")


def named(body: Json, name: str, **meta: Any) -> Json:
    return body | {"metadata": {"name": name} | meta}


async def make_pods(cluster: Cluster) -> None:
    await cluster.create(names.PODS, "selected", named(pod(), "a"))
    await cluster.create(names.PODS, "selected", named(pod(nodeName="worker"), "b"))


def test_field_selectors_match_the_same_pods(targets: Targets) -> None:
    memory = MemoryCluster()
    memory.create_namespace("selected")
    targets.plane.make_namespace("selected")
    targets.plane.wait_for_account("selected")
    for cluster in (memory, targets.real.cluster):
        targets.run(make_pods(cluster))
    for selector in FIELD_SELECTORS:
        path = f"/api/v1/namespaces/selected/pods?fieldSelector={urllib.parse.quote(selector)}"
        try:
            expected: Any = [item["metadata"]["name"] for item in targets.plane.request("GET", path)["items"]]
        except ApiError as error:
            expected = error.status
        try:
            listed = targets.run(memory.list(names.PODS, "selected", field_selector=selector))
            got: Any = [item["metadata"]["name"] for item in listed.items]
        except ClusterError as error:
            got = error.code
        assert got == expected, selector


async def change_labels(cluster: Cluster) -> None:
    """Make a Service match, change, no longer match, and delete it while it matches again."""
    for colour in ("red", "blue", "blue", "red", "blue"):
        body: Json = {"metadata": {"labels": {"colour": colour}}}
        try:
            await cluster.patch(names.SERVICES, "watched", "s", body)
        except NotFound:
            await cluster.create(names.SERVICES, "watched", named(service(), "s", labels={"colour": colour}))
        await cluster.patch(names.SERVICES, "watched", "s", {"spec": {"publishNotReadyAddresses": colour == "blue"}})
    await cluster.delete(names.SERVICES, "watched", "s")


def test_a_watch_with_a_selector_sends_the_same_events(targets: Targets) -> None:
    memory = MemoryCluster()
    memory.create_namespace("watched")
    targets.plane.make_namespace("watched")
    since = targets.run(list_all(targets.real.cluster, names.SERVICES, "watched")).resource_version
    watch = memory.watch(names.SERVICES, "watched", "colour=blue", resource_version=str(memory.store.version))
    for cluster in (memory, targets.real.cluster):
        targets.run(change_labels(cluster))
    path = "/api/v1/namespaces/watched/services?labelSelector=colour%3Dblue"
    expected = [outline(event) for event in targets.plane.history(path, since)]
    assert [outline(event) for event in watch.take()] == expected
    assert len(expected) > 4


def outline(event: Json) -> str:
    obj = event["object"]
    return json.dumps([event["type"], obj["metadata"]["labels"], obj["spec"].get("publishNotReadyAddresses")])


async def fill(cluster: Cluster) -> None:
    await cluster.create(names.DDPJOBS, "doomed", named(job(), "a"))
    await cluster.create(names.PODS, "doomed", named(pod(), "a"))
    await cluster.create(names.SERVICES, "doomed", named(service(), "a"))
    await cluster.create(names.CLAIMS, "doomed", named(claim(), "a"))


async def contents(cluster: Cluster) -> list[str]:
    kinds = (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS)
    lists = [await list_all(cluster, kind, "doomed") for kind in kinds]
    return [f"{obj['kind']}/{obj['metadata']['name']}" for listed in lists for obj in listed.items]


def _holds(targets: Targets, expected: list[str]) -> bool:
    return targets.run(contents(targets.real.cluster)) == expected


def test_a_deleted_namespace_is_emptied_and_refuses_new_objects(targets: Targets) -> None:
    memory = MemoryCluster(collects=False)
    memory.create_namespace("doomed")
    targets.plane.make_namespace("doomed")
    targets.plane.wait_for_account("doomed")
    # A pod with a finalizer delays the other objects: pods are deleted first.
    held = named(pod(), "held", finalizers=["example.com/hold"])
    for cluster in (memory, targets.real.cluster):
        targets.run(fill(cluster))
        targets.run(cluster.create(names.PODS, "doomed", held))
    memory.delete_namespace("doomed")
    targets.plane.request("DELETE", "/api/v1/namespaces/doomed")
    errors = []
    for cluster in (memory, targets.real.cluster):
        with pytest.raises(NamespaceTerminating) as caught:
            targets.run(cluster.create(names.PODS, "doomed", named(pod(), "late")))
        errors.append((str(caught.value), caught.value.code, caught.value.details))
    assert errors[0] == errors[1]
    for release in (False, True):
        if release:
            for cluster in (memory, targets.real.cluster):
                targets.run(cluster.patch(names.PODS, "doomed", "held", {"metadata": {"finalizers": None}}))
        memory.collect()
        left = targets.run(contents(memory))
        agrees = partial(_holds, targets, left)
        eventually(f"only {left} is left", agrees)
    assert not left


def test_a_pod_is_bound_once_and_not_while_it_terminates(targets: Targets) -> None:
    memory = MemoryCluster()
    memory.create_namespace("placed")
    targets.plane.make_namespace("placed")
    targets.plane.wait_for_account("placed")
    for cluster in (memory, targets.real.cluster):
        targets.run(cluster.create(names.PODS, "placed", named(pod(), "p")))

    def bind(node: str) -> str:
        body = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": node}}
        try:
            targets.plane.request("POST", "/api/v1/namespaces/placed/pods/p/binding", body)
        except ApiError as error:
            return str(error).removeprefix("HTTP 409: ")
        return ""

    def bind_in_memory(node: str) -> str:
        try:
            memory.server.bind("placed", "p", node)
        except ClusterError as error:
            return str(error)
        return ""

    for step in (1, 2, 3):
        if step == 3:
            for cluster in (memory, targets.real.cluster):
                targets.run(cluster.delete(names.PODS, "placed", "p"))
        assert bind_in_memory(f"node-{step}") == bind(f"node-{step}")
        bodies = [targets.run(cluster.get(names.PODS, "placed", "p")) for cluster in (memory, targets.real.cluster)]
        for body in bodies:
            for condition in body["status"]["conditions"]:
                assert condition.pop("lastTransitionTime")
        assert bodies[0]["spec"] == bodies[1]["spec"]
        assert bodies[0]["status"] == bodies[1]["status"]
        assert bodies[0]["metadata"].get("generation") == bodies[1]["metadata"].get("generation")


def test_quantities_are_written_in_the_same_form(targets: Targets) -> None:
    memory = MemoryCluster()
    memory.create_namespace("measured")
    targets.plane.make_namespace("measured")
    targets.plane.wait_for_account("measured")
    written = [*QUANTITIES, *(f"{number}{unit}" for number in ("1.5", "0.001", "2048") for unit in UNITS)]
    spelled = []
    for cluster in (memory, targets.real.cluster):
        claims = []
        for index, text in enumerate(written):
            size = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi", "other": text}}}
            made = targets.run(cluster.create(names.CLAIMS, "measured", named(claim(**size), f"c{index}")))
            claims.append(made["spec"]["resources"]["requests"]["other"])
        spelled.append(claims)
    assert spelled[0] == spelled[1]


def test_a_client_cannot_set_the_deletion_timestamp(targets: Targets) -> None:
    memory = MemoryCluster()
    memory.create_namespace("claimed")
    targets.plane.make_namespace("claimed")
    targets.plane.wait_for_account("claimed")
    body = {"metadata": {"deletionTimestamp": "2020-01-01T00:00:00Z"}}
    for kind, made in ((names.DDPJOBS, job()), (names.PODS, pod()), (names.CLAIMS, claim())):
        errors = []
        for cluster in (memory, targets.real.cluster):
            targets.run(cluster.create(kind, "claimed", named(made, "a")))
            with pytest.raises(Invalid, match="field is immutable") as caught:
                targets.run(cluster.patch(kind, "claimed", "a", body))
            errors.append((caught.value.code, {cause["field"] for cause in caught.value.details["causes"]}))
        assert errors[0] == errors[1]
