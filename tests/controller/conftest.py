"""Fixtures: the jobs of a namespace, an operator for it, and a proxy between operator and API server."""

from collections.abc import Iterator

import pytest

from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import tail
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import FaultProxy

NEVER = 86_400
"""A sweep interval so long that only watch events can report changes."""


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str) -> Jobs:
    return Jobs(control_plane, namespace)


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: str) -> Iterator[OperatorProcess]:
    """Return an operator for the test's namespace that sweeps only at its start."""
    with OperatorProcess(control_plane, namespace, sweep_interval_seconds=NEVER) as operator:
        yield operator


@pytest.fixture
def operator_behind_proxy(control_plane: ControlPlane, namespace: str, proxy: FaultProxy) -> Iterator[OperatorProcess]:
    """Return an operator, not yet started, whose requests go through ``proxy``."""
    operator = OperatorProcess(
        control_plane, namespace, server=proxy.server, name="operator-behind-proxy", sweep_interval_seconds=NEVER
    )
    yield operator
    if operator.is_alive:
        operator.kill()
    print(tail(operator.log, lines=60))
