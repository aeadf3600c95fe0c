"""The API server behind a proxy, and a client there; the API server and its namespaces are those of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.worlds import ClusterWorld
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import FaultProxy


@pytest.fixture
def world(control_plane: ControlPlane, namespace: str, proxy: FaultProxy) -> Iterator[ClusterWorld]:
    """Provide a client behind the proxy."""
    made = ClusterWorld(control_plane, namespace, proxy.server)
    with made.client:
        yield made
