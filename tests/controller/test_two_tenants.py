"""Two tenants on a real API server: the requests of one are slow, the other must not notice it."""

import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from tests.controller.conftest import NEVER
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver
WEBHOOK_SECONDS = 10.0
BOUND_SECONDS = 8.0
"""Less than one create of the slow tenant takes: its jobs are not waited for, however busy the machine is."""


@pytest.fixture
def slow(control_plane: ControlPlane, namespace: str) -> Jobs:
    """Return the jobs of the tenant behind the slow webhook."""
    control_plane.make_namespace(f"{namespace}-slow")
    return Jobs(control_plane, f"{namespace}-slow")


@pytest.fixture
def operator_of_both(
    control_plane: ControlPlane, namespace: str, slow: Jobs, proxy: FaultProxy
) -> Iterator[OperatorProcess]:
    with OperatorProcess(
        control_plane,
        f"{namespace},{slow.namespace}",
        server=proxy.server,
        name="operator-of-two-tenants",
        sweep_interval_seconds=NEVER,
    ) as operator:
        yield operator


def test_slow_admission_of_one_tenant_does_not_delay_another(
    operator_of_both: OperatorProcess, slow: Jobs, jobs: Jobs, proxy: FaultProxy
) -> None:
    """Ten jobs of 64 nodes, whose creates take as long as an admission webhook may, beside a job of 16 nodes."""
    held: list[str] = []

    def rule(request: web.BaseRequest) -> Fault | None:
        if request.method != "POST" or f"/{slow.namespace}/" not in request.path or request.path.endswith("/events"):
            return None
        held.append(request.path)
        return Fault(hold=WEBHOOK_SECONDS, forward=True)

    proxy.rule = rule
    for number in range(10):
        slow.submit(f"big-{number}", numNodes=64)
    eventually("creates of the slow tenant wait", lambda: len(held) >= 28)
    assert operator_of_both.is_ready()
    began = time.monotonic()
    jobs.submit(numNodes=16)
    jobs.wait_for_pods(16)
    waited = time.monotonic() - began
    print(f"16 pods after {waited:.2f} s, beside {len(held)} creates that take {WEBHOOK_SECONDS:g} s")
    assert waited < BOUND_SECONDS
