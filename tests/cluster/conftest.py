"""Fixtures: the client under test, with administrator rights on a real API server."""

from collections.abc import AsyncIterator

import pytest

from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.worlds.client import operators_client
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import FaultProxy


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[KubernetesCluster]:
    """Return a client of the API server."""
    async with operators_client(control_plane.kubeconfig()) as client:
        yield client


@pytest.fixture
async def through_proxy(control_plane: ControlPlane, proxy: FaultProxy) -> AsyncIterator[KubernetesCluster]:
    """Return a client through the proxy. Its requests time out after five seconds."""
    async with operators_client(control_plane.kubeconfig(server=proxy.server), timeout=5.0) as client:
        yield client
