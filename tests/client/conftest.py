"""The contract's two worlds; the API server and its namespaces are those of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddpjob import DDPJobError
from tests.client.worlds import ClusterWorld, LocalWorld, World
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import FaultProxy


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.apiserver)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Provide a client and what makes its jobs run; jobs that a failed test left are deleted."""
    made: World
    if request.param == "local":
        made = LocalWorld(tmp_path)
    else:
        made = ClusterWorld(request.getfixturevalue("control_plane"), request.getfixturevalue("namespace"))
    with made.client:
        yield made
        for job in made.client.list():
            with suppress(DDPJobError):
                made.client.delete(job)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    """Provide a proxy of the API server that injects faults."""
    with FaultProxy(control_plane) as made:
        yield made
