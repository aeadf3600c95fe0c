"""Fixtures: the client under test, with administrator rights on a real API server."""

from collections.abc import AsyncIterator, Iterator

import pytest

from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import FaultProxy


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[KubernetesCluster]:
    """Return a client of the API server."""
    connection = await Connection.open(str(control_plane.kubeconfig()))
    client = KubernetesCluster(connection)
    yield client
    await client.close()
    await connection.close()


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    """Return a proxy to the API server that injects faults."""
    with FaultProxy(control_plane) as proxy:
        yield proxy


@pytest.fixture
async def through_proxy(control_plane: ControlPlane, proxy: FaultProxy) -> AsyncIterator[KubernetesCluster]:
    """Return a client through the proxy. Its requests time out after five seconds."""
    connection = await Connection.open(str(control_plane.kubeconfig(server=proxy.server)))
    client = KubernetesCluster(connection, timeout=5.0)
    yield client
    await client.close()
    await connection.close()
