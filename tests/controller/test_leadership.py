"""Of two replicas one works; the other takes over when the first is killed, stops, or no longer renews the Lease."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from ddpjob.api import names
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from ddpjob_operator.controller.leadership import LEASE_SECONDS, MAX_LEASE_SECONDS, Leadership
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually, eventually_async
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver
KILL_SECONDS = 15.0


@pytest.fixture
def replicas(control_plane: ControlPlane, namespace: str) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """Return the leader and a standby."""
    first, second = (
        OperatorProcess(
            control_plane, namespace, name=f"replica-{number}", identity=f"{number}", lease=f"{namespace}/operator"
        )
        for number in (1, 2)
    )
    with first, second:
        yield first, second
        if not first.is_alive:
            first.start()  # so that it can be stopped


def holder(plane: ControlPlane, namespace: str) -> str:
    lease = plane.request("GET", f"/{names.LEASES.path(namespace)}/operator")
    return str(lease["spec"].get("holderIdentity", ""))


def seconds_until_pods(jobs: Jobs, name: str) -> float:
    """Submit a job, and return the time until its pod exists."""
    began = time.monotonic()
    jobs.submit(name)
    jobs.wait_for_pods(1, name)
    return time.monotonic() - began


def test_standby_takes_over_after_the_leader_was_killed(
    replicas: tuple[OperatorProcess, OperatorProcess], jobs: Jobs
) -> None:
    leader, standby = replicas
    seconds_until_pods(jobs, "before")
    assert standby.get("/readyz") == (200, "standby: 1 holds the Lease\n")
    assert (leader.metric("ddpjob_leader"), standby.metric("ddpjob_leader")) == (1, 0)
    assert "ddpjob_namespace_served{" not in standby.get("/metrics")[1], (
        "an alert on 0 is about the leader's namespaces"
    )
    assert "ddpjob_watch_age_seconds{" not in standby.get("/metrics")[1]
    assert "sweep" not in standby.text() and standby.metric("ddpjob_reconcile_duration_seconds_count") == 0
    leader.kill()
    waited = seconds_until_pods(jobs, "after")
    print(f"pods of a new job {waited:.1f} s after kill -9 of the leader")
    assert waited < KILL_SECONDS
    assert holder(jobs.plane, jobs.namespace) == "2"
    leader.start()
    eventually("the killed replica stands by", lambda: "standby: 2 holds" in leader.get("/readyz")[1])


def test_stopped_leader_gives_the_lease_to_the_standby_at_once(
    replicas: tuple[OperatorProcess, OperatorProcess], jobs: Jobs
) -> None:
    leader, standby = replicas
    assert leader.stop() == 0
    assert holder(jobs.plane, jobs.namespace) != "1", "released, so the standby waits for no end of it"
    seconds_until_pods(jobs, "after")
    assert standby.metric("ddpjob_leader") == 1


def test_replica_that_lost_the_lease_ends(
    replicas: tuple[OperatorProcess, OperatorProcess], jobs: Jobs, control_plane: ControlPlane
) -> None:
    """As after a pause of its machine, in which the standby has taken over."""
    leader, _ = replicas
    path = f"/{names.LEASES.path(jobs.namespace)}/operator"
    control_plane.request("PATCH", path, {"spec": {"holderIdentity": "2"}})
    eventually("it ends", lambda: not leader.is_alive)
    assert "2 holds the Lease" in leader.text()
    assert leader.kill() == 1
    assert seconds_until_pods(jobs, "after") < KILL_SECONDS


def test_lease_is_renewed_while_requests_for_jobs_use_all_connections(
    control_plane: ControlPlane, proxy: FaultProxy, jobs: Jobs
) -> None:
    """For example because an admission webhook delays the creates of a thousand pods."""
    proxy.rule = lambda request: (
        Fault(hold=30.0) if request.method == "POST" and request.path.endswith("/pods") else None
    )
    operator = OperatorProcess(
        control_plane,
        jobs.namespace,
        server=proxy.server,
        name="busy",
        identity="busy",
        lease=f"{jobs.namespace}/operator",
        max_concurrent_requests=1,
    )
    with operator:
        jobs.submit()
        eventually("a create waits", lambda: any(s.method == "POST" and "/pods" in s.path for s in proxy.seen))
        before = len(proxy.seen)
        eventually(
            "the Lease is renewed",
            lambda: any("/leases/" in s.path and s.method == "PATCH" for s in proxy.seen[before:]),
            timeout=9.0,
        )


async def test_lease_of_another_program_keeps_no_replica_from_its_work(
    control_plane: ControlPlane, namespace: str
) -> None:
    """It has another holder and a duration of an hour, and no program renews it."""
    body = {"apiVersion": names.LEASES.api_version, "kind": names.LEASES.kind, "metadata": {"name": "operator"}}
    spec = {"holderIdentity": "stranger", "leaseDurationSeconds": 3600}
    control_plane.request("POST", f"/{names.LEASES.path(namespace)}", body | {"spec": spec})
    connection = await Connection.open(str(control_plane.kubeconfig()))
    cluster, passed = KubernetesCluster(connection), 0.0
    standby = Leadership(
        cluster, namespace, "operator", identity="1", now=lambda: datetime.now(UTC), clock=lambda: passed
    )
    acquiring = asyncio.create_task(standby.acquire(asyncio.Event()))
    await eventually_async("it stands by", lambda: standby.holder == "stranger")
    assert standby.standby() == (True, "standby: stranger holds the Lease")
    passed = LEASE_SECONDS * 2 + 1
    ready, why = standby.standby()
    assert not ready and "has not renewed" in why
    passed = MAX_LEASE_SECONDS + 1
    async with asyncio.timeout(60):
        await acquiring
    assert standby.is_leader
    await cluster.close()
