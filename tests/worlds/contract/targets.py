"""The two clusters that get the same requests: the in-memory one, and a real control plane with its controllers."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane
from tests.worlds.listing import list_all
from tests.worlds.memory import RESOURCES, MemoryCluster

NAMESPACE = "contract"
KINDS = RESOURCES
CLAIM_CONTROLLER = "persistentvolumeclaim-protection-controller"


class ContractPlane(ControlPlane):
    """A control plane whose controllers know DDPJobs from the start, protect claims and have no rate limit."""

    def _start_controllers(self) -> None:
        self.apply_crd()  # a running collector looks for new kinds only every 30 s
        super()._start_controllers()

    def _run(self, name: str, *flags: str) -> None:
        if name == "kube-controller-manager":
            flags = tuple(f"{flag},{CLAIM_CONTROLLER}" if flag.startswith("--controllers=") else flag for flag in flags)
            flags += ("--kube-api-qps=1000", "--kube-api-burst=1000")
        super()._run(name, *flags)

    def wait_for_account(self, namespace: str) -> None:
        """Wait for the default service account. Pods are refused without it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        eventually(f"the default service account of {namespace}", lambda: self._exists(path))


@contextmanager
def contract_plane() -> Iterator[ContractPlane]:
    with ContractPlane(controller_manager=True) as plane:
        plane.make_namespace(NAMESPACE)
        plane.wait_for_account(NAMESPACE)
        yield plane


class RealTarget:
    """A real API server through the real client, with all events of its watches."""

    name = "real"

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self.events: list[tuple[Resource, Json]] = []

    def take_events(self) -> list[tuple[Resource, Json]]:
        taken, self.events = self.events, []
        return taken

    async def follow(self, session: aiohttp.ClientSession, server: str, resource: Resource, since: str) -> None:
        """Read a watch until the task is cancelled."""
        url = f"{server}/{resource.path(NAMESPACE)}"
        query = {"watch": "true", "resourceVersion": since}
        async with session.get(url, params=query, timeout=aiohttp.ClientTimeout(total=None)) as response:
            response.raise_for_status()
            async for line in response.content:
                self.events.append((resource, json.loads(line)))


class MemoryTarget:
    """The in-memory cluster. It collects garbage only in ``collect``."""

    name = "memory"

    def __init__(self) -> None:
        self.cluster = MemoryCluster(collects=False)
        self.cluster.create_namespace(NAMESPACE)
        self._watches = [(resource, self.cluster.watch(resource, NAMESPACE)) for resource in KINDS]

    def take_events(self) -> list[tuple[Resource, Json]]:
        return [(resource, event) for resource, watch in self._watches for event in watch.take()]


@asynccontextmanager
async def both_targets(plane: ControlPlane) -> AsyncIterator[tuple[MemoryTarget, RealTarget]]:
    """Yield both clusters, empty, with the watches open."""
    connection = await Connection.open(str(plane.kubeconfig()))
    cluster = KubernetesCluster(connection)
    real = RealTarget(cluster)
    async with connection.session(0) as session:
        since = (await list_all(cluster, names.EVENTS, NAMESPACE)).resource_version
        followers = [asyncio.create_task(real.follow(session, connection.server, kind, since)) for kind in KINDS]
        try:
            yield MemoryTarget(), real
        finally:
            for task in followers:
                task.cancel()
            results: list[Any] = await asyncio.gather(*followers, return_exceptions=True)
            await cluster.close()
            await connection.close()
    broken = [result for result in results if not isinstance(result, asyncio.CancelledError)]
    assert not broken, f"a watch of the real API server ended: {broken}"
