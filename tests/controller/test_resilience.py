"""The operator under faults: kills, restarts, lost connections and responses must not affect the jobs."""

import pytest
from aiohttp import web

from tests.controller.conftest import NEVER
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver


def is_watch(request: web.BaseRequest, plural: str = "") -> bool:
    return request.query.get("watch") == "true" and request.path.endswith(plural)


def test_restart_of_the_operator_writes_nothing(control_plane: ControlPlane, namespace: str, jobs: Jobs) -> None:
    operator = OperatorProcess(control_plane, namespace, sweep_interval_seconds=NEVER)
    with operator:
        jobs.submit(numNodes=2)
        for pod in jobs.wait_for_pods(2):
            jobs.run(pod)
        jobs.wait_for("Running", nodesReady="2/2")
        jobs.settle()
        pods = {pod["metadata"]["uid"] for pod in jobs.pods()}
        writes = len(jobs.writes(about="mnist"))
    with operator:
        jobs.settle()
        assert {pod["metadata"]["uid"] for pod in jobs.pods()} == pods
        assert jobs.writes(about="mnist", since=writes) == []
        jobs.end(jobs.pods()[0], 0)
        jobs.wait_for("Running", succeededNodes=[0])


def test_sigterm_stops_the_operator_cleanly(control_plane: ControlPlane, namespace: str, jobs: Jobs) -> None:
    operator = OperatorProcess(control_plane, namespace)
    operator.start()
    jobs.submit(numNodes=8)
    assert operator.stop() == 0
    assert operator.lines()[-1]["message"] == "stopped"


def test_operator_stays_alive_during_an_outage_of_the_api_server(
    operator_behind_proxy: OperatorProcess, proxy: FaultProxy, jobs: Jobs
) -> None:
    operator = operator_behind_proxy
    operator.start()
    proxy.rule = lambda request: Fault(status=503)
    proxy.cut()
    jobs.submit()
    seen = len(proxy.seen)
    eventually("the operator tries on", lambda: len(proxy.seen) > seen + 5)
    assert operator.get("/healthz")[0] == 200
    proxy.rule = lambda request: None
    jobs.wait_for_pods(1)
    eventually("it is ready again", operator.is_ready)


def test_operator_is_alive_but_not_ready_before_its_watches_are_open(
    operator_behind_proxy: OperatorProcess, proxy: FaultProxy
) -> None:
    operator = operator_behind_proxy
    proxy.rule = lambda request: Fault(status=503) if is_watch(request, "/pods") else None
    operator.start(wait=False)
    eventually("it tries to watch pods", lambda: any("/pods?" in s.path and "watch=true" in s.path for s in proxy.seen))
    eventually("it is alive", lambda: operator.get("/healthz")[0] == 200)
    eventually("the watch of the jobs is open", lambda: "/pods is not open" in operator.get("/readyz")[1])
    assert operator.get("/readyz")[0] == 503
    proxy.rule = lambda request: None
    eventually("it is ready", operator.is_ready)


def test_missing_crd_is_reported_and_the_operator_starts_once_it_exists() -> None:
    with ControlPlane() as plane:
        operator = OperatorProcess(plane, "")
        operator.start(wait=False)
        try:
            eventually("it says so", lambda: "install the CustomResourceDefinition" in operator.text())
            assert operator.get("/healthz")[0] == 200
            assert operator.get("/readyz")[0] == 503
            plane.apply_crd()
            eventually("it is ready", operator.is_ready)
            plane.make_namespace("anywhere")
            jobs = Jobs(plane, "anywhere")
            jobs.submit()
            jobs.wait_for_pods(1)
        finally:
            assert operator.stop() == 0


def test_rejected_credentials_are_reported(control_plane: ControlPlane, namespace: str) -> None:
    operator = OperatorProcess(control_plane, namespace, token="wrong", name=f"stranger-{namespace}")
    operator.start(wait=False)
    try:
        eventually("it says so", lambda: "does not accept the operator's credentials" in operator.text())
        assert "wrong" not in operator.text()
    finally:
        assert operator.stop() == 0
