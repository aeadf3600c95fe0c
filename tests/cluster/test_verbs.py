"""The client's LISTs and errors on a real API server; ``tests/worlds/contract`` has its other verbs and errors."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob_operator.cluster import kubernetes
from ddpjob_operator.cluster.base import (
    Forbidden,
    Invalid,
    NotFound,
    Unauthorized,
    Unavailable,
)
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.processes import free_port
from tests.worlds.client import list_all, operators_client
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.memory import MemoryCluster

pytestmark = pytest.mark.apiserver


def a_pod(name: str = "pod", **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "main", "image": "image:1"}]},
    }


def a_job(name: str = "job") -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "metadata": {"name": name},
        "spec": {"image": "image:1"},
    }


async def test_a_list_returns_complete_objects_of_one_namespace_by_label(
    cluster: KubernetesCluster, namespace: str, control_plane: ControlPlane
) -> None:
    control_plane.make_namespace(f"{namespace}-other")
    for place, name, side in (("", "a", "left"), ("", "b", "right"), ("-other", "c", "left")):
        await cluster.create(names.PODS, namespace + place, a_pod(name, side=side, of=namespace))
    listed = await list_all(cluster, names.PODS, namespace, "side=left")
    assert [(pod["kind"], pod["apiVersion"], pod["metadata"]["name"]) for pod in listed.items] == [("Pod", "v1", "a")]
    everywhere = await list_all(cluster, names.PODS, None, f"of={namespace},side=left")
    assert {pod["metadata"]["name"] for pod in everywhere.items} == {"a", "c"}
    assert int(everywhere.resource_version) >= int(listed.resource_version)


async def test_a_list_of_several_pages_is_complete(
    cluster: KubernetesCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_SIZE", 2)
    for number in range(5):
        await cluster.create(names.PODS, namespace, a_pod(f"pod-{number}"))
    listed = await list_all(cluster, names.PODS, namespace)
    assert [pod["metadata"]["name"] for pod in listed.items] == [f"pod-{number}" for number in range(5)]


async def test_a_list_whose_next_page_expired_is_read_again_in_one_page(
    cluster: KubernetesCluster,
    through_proxy: KubernetesCluster,
    proxy: FaultProxy,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_SIZE", 2)
    expired = Fault(status=410, body='{"kind":"Status","reason":"Expired","message":"the continue token is too old"}')
    proxy.rule = lambda request: expired if "continue" in request.query else None
    for number in range(5):
        await cluster.create(names.PODS, namespace, a_pod(f"pod-{number}"))
    assert len((await list_all(through_proxy, names.PODS, namespace)).items) == 5


async def test_a_log_without_a_kubelet_is_empty_as_in_memory(cluster: KubernetesCluster, namespace: str) -> None:
    memory = MemoryCluster()
    for each, place in ((cluster, namespace), (memory, "default")):
        await each.create(names.PODS, place, a_pod())
        assert await each.read_log(place, "pod", "main", lines=5, limit=100) == ""
        with pytest.raises(NotFound, match='pods "none" not found'):
            await each.read_log(place, "none", "main", lines=5, limit=100)


async def test_a_delete_without_a_name_keeps_the_collection(cluster: KubernetesCluster, namespace: str) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    for name in ("", "/", "../services/pod", "pod/../..", "pod?x", "%2e%2e"):
        with pytest.raises(Invalid, match="is no name"):
            await cluster.delete(names.PODS, namespace, name)
    assert len((await list_all(cluster, names.PODS, namespace)).items) == 1


async def test_missing_rights_a_wrong_token_and_an_absent_server_raise_errors_of_their_own(
    control_plane: ControlPlane, namespace: str
) -> None:
    no_rights = control_plane.service_account(namespace, "no-rights")
    cases = (
        (control_plane.kubeconfig(no_rights, name=f"no-rights-{namespace}"), Forbidden, "cannot create resource"),
        (control_plane.kubeconfig("wrong", name=f"wrong-{namespace}"), Unauthorized, "."),
        (control_plane.kubeconfig(server=f"http://127.0.0.1:{free_port()}"), Unavailable, "create Pod"),
    )
    for kubeconfig, error, message in cases:
        async with operators_client(kubeconfig) as client:
            with pytest.raises(error, match=message):
                await client.create(names.PODS, namespace, a_pod())
