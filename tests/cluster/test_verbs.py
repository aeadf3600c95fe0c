"""The client's verbs and every typed error, on a real API server."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob_operator.cluster import kubernetes
from ddpjob_operator.cluster.base import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    Unauthorized,
    Unavailable,
)
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.processes import free_port
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.listing import list_all
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


async def test_a_created_object_is_read_back_and_deleted(cluster: KubernetesCluster, namespace: str) -> None:
    created = await cluster.create(names.PODS, namespace, a_pod())
    assert await cluster.get(names.PODS, namespace, "pod") == created
    await cluster.delete(names.PODS, namespace, "pod", uid=created["metadata"]["uid"], grace_seconds=0)
    with pytest.raises(NotFound, match='pods "pod" not found'):
        await cluster.get(names.PODS, namespace, "pod")


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


async def test_a_status_patch_changes_only_the_status_and_only_at_its_version(
    cluster: KubernetesCluster, namespace: str
) -> None:
    job = await cluster.create(names.DDPJOBS, namespace, a_job())
    version = job["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version}, "status": {"state": "Pending"}, "spec": {"numNodes": 7}}
    patched = await cluster.patch_status(names.DDPJOBS, namespace, "job", patch)
    assert patched["status"] == {"state": "Pending"}
    assert patched["spec"] == job["spec"]
    with pytest.raises(Conflict, match="the object has been modified"):
        await cluster.patch_status(names.DDPJOBS, namespace, "job", patch | {"status": {"state": "Running"}})


async def test_a_patch_changes_an_object(cluster: KubernetesCluster, namespace: str) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    body = {"metadata": {"labels": {"colour": "blue"}}}
    assert (await cluster.patch(names.PODS, namespace, "pod", body))["metadata"]["labels"] == {"colour": "blue"}


async def test_a_log_without_a_kubelet_is_empty_as_in_memory(cluster: KubernetesCluster, namespace: str) -> None:
    memory = MemoryCluster()
    for each, place in ((cluster, namespace), (memory, "default")):
        await each.create(names.PODS, place, a_pod())
        assert await each.read_log(place, "pod", "main", lines=5, limit=100) == ""
        with pytest.raises(NotFound, match='pods "none" not found'):
            await each.read_log(place, "none", "main", lines=5, limit=100)


async def test_a_second_create_of_the_same_name_raises_already_exists(
    cluster: KubernetesCluster, namespace: str
) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    with pytest.raises(AlreadyExists, match='pods "pod" already exists'):
        await cluster.create(names.PODS, namespace, a_pod())


async def test_a_delete_with_another_uid_raises_conflict(cluster: KubernetesCluster, namespace: str) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    with pytest.raises(Conflict):
        await cluster.delete(names.PODS, namespace, "pod", uid="00000000-0000-0000-0000-000000000000")
    assert await cluster.get(names.PODS, namespace, "pod")


async def test_a_delete_without_a_name_keeps_the_collection(cluster: KubernetesCluster, namespace: str) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    for name in ("", "/", "../services/pod", "pod/../..", "pod?x", "%2e%2e"):
        with pytest.raises(Invalid, match="is no name"):
            await cluster.delete(names.PODS, namespace, name)
    assert len((await list_all(cluster, names.PODS, namespace)).items) == 1


async def test_an_unknown_field_of_a_pod_is_refused_by_name(cluster: KubernetesCluster, namespace: str) -> None:
    body = a_pod()
    body["spec"]["hostNetwrok"] = True
    with pytest.raises(Invalid, match="hostNetwrok"):
        await cluster.create(names.PODS, namespace, body)


async def test_an_invalid_object_is_refused_with_the_field(cluster: KubernetesCluster, namespace: str) -> None:
    body = a_pod()
    body["spec"]["restartPolicy"] = "Sometimes"
    with pytest.raises(Invalid, match=r"spec\.restartPolicy"):
        await cluster.create(names.PODS, namespace, body)


async def test_a_missing_permission_raises_forbidden_with_the_servers_message(
    control_plane: ControlPlane, namespace: str
) -> None:
    token = control_plane.service_account(namespace, "no-rights")
    connection = await Connection.open(str(control_plane.kubeconfig(token, name=f"no-rights-{namespace}")))
    client = KubernetesCluster(connection)
    with pytest.raises(Forbidden, match='cannot create resource "pods"'):
        await client.create(names.PODS, namespace, a_pod())
    await client.close()
    await connection.close()


async def test_a_create_in_a_terminating_namespace_raises_its_own_error(
    cluster: KubernetesCluster, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.request("DELETE", f"/api/v1/namespaces/{namespace}")  # stays: nothing finalizes it here
    with pytest.raises(NamespaceTerminating, match="is being terminated"):
        await cluster.create(names.PODS, namespace, a_pod())


async def test_a_refused_token_raises_unauthorized(control_plane: ControlPlane, namespace: str) -> None:
    connection = await Connection.open(str(control_plane.kubeconfig("wrong", name=f"wrong-{namespace}")))
    client = KubernetesCluster(connection)
    with pytest.raises(Unauthorized):
        await client.get(names.PODS, namespace, "pod")
    await client.close()
    await connection.close()


async def test_an_unreachable_server_raises_unavailable(control_plane: ControlPlane, namespace: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    connection = await Connection.open(str(control_plane.kubeconfig(server=nowhere)))
    client = KubernetesCluster(connection)
    with pytest.raises(Unavailable, match="get Pod"):
        await client.get(names.PODS, namespace, "pod")
    await client.close()
    await connection.close()


async def test_requests_carry_the_operators_user_agent(
    cluster: KubernetesCluster, control_plane: ControlPlane, namespace: str
) -> None:
    await cluster.create(names.PODS, namespace, a_pod())
    ours = [write for write in control_plane.writes() if write["objectRef"].get("namespace") == namespace]
    assert any(write["userAgent"].startswith("ddpjob-operator/") for write in ours), ours
