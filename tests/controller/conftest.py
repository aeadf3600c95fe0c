"""A namespace's jobs, an operator that serves them, a proxy that can come between."""

from collections.abc import Iterator

import pytest

from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.controlplane import ControlPlane
from tests.faults import FaultProxy

NEVER = 86_400
"""A sweep interval under which nothing but watch events can have brought news."""


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str) -> Jobs:
    return Jobs(control_plane, namespace)


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: str) -> Iterator[OperatorProcess]:
    """Serves the test's namespace; sweeps once at its start and never again."""
    with OperatorProcess(control_plane, namespace, sweep_interval_seconds=NEVER) as operator:
        yield operator


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane) as proxy:
        yield proxy


@pytest.fixture
def operator_behind_proxy(control_plane: ControlPlane, namespace: str, proxy: FaultProxy) -> Iterator[OperatorProcess]:
    """The same with everything it says to the API server going through ``proxy``. Not started yet."""
    operator = OperatorProcess(
        control_plane, namespace, server=proxy.server, name="operator-behind-proxy", sweep_interval_seconds=NEVER
    )
    yield operator
    if operator.process is not None:
        operator.kill()
