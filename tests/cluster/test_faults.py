"""The client on an API server or a network that fails."""

import asyncio
import time

import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob_operator.cluster.base import AlreadyExists, Conflict, TooManyRequests, Unavailable
from ddpjob_operator.cluster.kubernetes import RETRY_SECONDS, KubernetesCluster
from tests.cluster.test_verbs import a_job, a_pod
from tests.worlds.client import list_all, operators_client
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver


async def test_a_create_whose_response_is_lost_ends_as_already_exists(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    proxy.once("POST", "/pods", Fault(after_commit=True))
    with pytest.raises(AlreadyExists):
        await through_proxy.create(names.PODS, namespace, a_pod())
    assert len((await list_all(through_proxy, names.PODS, namespace)).items) == 1


async def test_a_status_patch_whose_response_is_lost_ends_as_conflict(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    job = await through_proxy.create(names.DDPJOBS, namespace, a_job())
    proxy.once("PATCH", "/status", Fault(after_commit=True))
    body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "status": {"state": "Pending"}}
    with pytest.raises(Conflict):
        await through_proxy.patch_status(names.DDPJOBS, namespace, "job", body)
    assert (await through_proxy.get(names.DDPJOBS, namespace, "job"))["status"] == {"state": "Pending"}


async def test_retry_after_is_obeyed(through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str) -> None:
    proxy.once("POST", "/pods", Fault(status=429, headers={"Retry-After": "1"}))
    await through_proxy.create(names.PODS, namespace, a_pod())
    first, second = (seen.time for seen in proxy.seen if seen.method == "POST")
    assert 1.0 <= second - first < 5.0


async def test_a_server_that_stays_busy_raises_its_retry_after(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    proxy.rule = lambda request: Fault(status=429, headers={"Retry-After": "50"})
    with pytest.raises(TooManyRequests) as caught:
        await through_proxy.get(names.PODS, namespace, "pod")
    assert caught.value.retry_after == 50
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_transient_server_error_is_retried(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str, status: int
) -> None:
    proxy.once("POST", "/pods", Fault(status=status), times=2)
    created = await through_proxy.create(names.PODS, namespace, a_pod())
    assert created["metadata"]["name"] == "pod"


async def test_a_lasting_server_error_raises_unavailable_in_bounded_time(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    body = '{"kind":"Status","message":"etcdserver: leader changed"}'
    proxy.rule = lambda request: Fault(status=500, body=body)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="etcdserver: leader changed") as caught:
        await through_proxy.get(names.PODS, namespace, "pod")
    assert time.monotonic() - began < RETRY_SECONDS + 20
    assert caught.value.code == 500
    assert len(proxy.seen) > 1


async def test_a_server_that_does_not_respond_raises_unavailable(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    proxy.rule = lambda request: Fault(hold=60)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="no answer within 5 s"):
        await through_proxy.get(names.PODS, namespace, "pod")
    assert time.monotonic() - began < RETRY_SECONDS + 20


async def test_a_response_that_is_not_json_raises_unavailable(
    through_proxy: KubernetesCluster, proxy: FaultProxy, namespace: str
) -> None:
    proxy.rule = lambda request: Fault(status=200, body="<html>log in to the network</html>")
    with pytest.raises(Unavailable, match="not JSON"):
        await through_proxy.get(names.PODS, namespace, "pod")


async def test_connections_are_limited(control_plane: ControlPlane, proxy: FaultProxy, namespace: str) -> None:
    connections = set()

    def count(request: web.BaseRequest) -> None:
        assert request.transport is not None
        connections.add(request.transport.get_extra_info("peername"))

    proxy.rule = count
    async with operators_client(control_plane.kubeconfig(server=proxy.server), max_connections=4) as client:
        await asyncio.gather(*(client.create(names.PODS, namespace, a_pod(f"pod-{n}")) for n in range(20)))
    assert 1 < len(connections) <= 4
