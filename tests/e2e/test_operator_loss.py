"""The operator's process is killed, or its node is lost: a standby works within seconds, and running jobs run on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ddpjob.api import names
from tests.e2e import nodes
from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import Installation
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.namespace import JobNamespace
from tests.kind import images
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]
RUNNING = ("one", "two")
KILL_SECONDS = 15.0
NODE_SECONDS = 40.0


@pytest.fixture(scope="module")
def replicas(operator: Installation, trials_ended: None) -> Iterator[Installation]:
    """Run two replicas, on different nodes."""
    operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS, replicas=2)
    operator.wait_until_ready()
    yield operator
    operator.wait_until_ready()
    operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.wait_until_ready()
    until("one replica is left", lambda: len(operator.pods()) == 1, seconds=60)


def seconds_until_pod(namespace: JobNamespace, name: str, began: float) -> float:
    """Apply a job, and return the time from ``began`` until its pod exists."""
    job = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": {"name": name}}
    namespace.kubectl.apply(job | {"spec": {"image": images.TRAINER_TAG, "command": ["sleep", "1"]}})
    selector = f"--selector={names.LABEL_JOB_NAME}={name}"
    until(f"the pod of {name}", lambda: namespace.kubectl.objects("pods", selector), seconds=120)
    waited = time.monotonic() - began
    print(f"{name}: pod after {waited:.1f} s")
    return waited


def run_jobs(namespace: JobNamespace, node: str) -> dict[str, tuple[str, int, bool]]:
    """Start jobs that run on a node, and return the identities of their pods and Services."""
    pinned = {"terminationGracePeriodSeconds": 1, "nodeSelector": {"kubernetes.io/hostname": node}}
    namespace.kubectl.apply(*(shell_job(name, "sleep 600", template={"spec": pinned}) for name in RUNNING))
    namespace.until_run(RUNNING)
    return namespace.identities()


def assert_untouched(namespace: JobNamespace, before: dict[str, tuple[str, int, bool]]) -> None:
    """Check that the jobs run in their first attempt, and that what they own is as before."""
    after = namespace.identities()
    assert {name: after.get(name) for name in before} == before
    for name in RUNNING:
        status = namespace.status(name)
        assert (status["state"], status["attempt"], status.get("failures", [])) == ("Running", 1, [])


def test_standby_takes_over_after_the_leader_is_killed(
    replicas: Installation, namespace: JobNamespace, cluster: Cluster
) -> None:
    before = run_jobs(namespace, nodes.staying(cluster)[0])
    killed = until("a replica leads", replicas.leader, seconds=30)
    began = time.monotonic()
    nodes.kill_first_process(killed)
    replicas.kubectl("delete", "pod", killed["metadata"]["name"], "--grace-period=0", "--force")
    assert seconds_until_pod(namespace, "after-kill", began) < KILL_SECONDS
    leader = until("another pod leads", replicas.leader, seconds=30)
    assert leader["metadata"]["uid"] != killed["metadata"]["uid"]
    assert_untouched(namespace, before)


def test_standby_takes_over_after_the_leaders_node_is_lost(
    replicas: Installation, namespace: JobNamespace, cluster: Cluster
) -> None:
    replicas.wait_until_ready()
    assert len({pod["spec"]["nodeName"] for pod in replicas.pods()}) == 2
    lost = until("a replica leads", replicas.leader, seconds=30)["spec"]["nodeName"]
    before = run_jobs(namespace, next(node for node in nodes.staying(cluster) if node != lost))
    nodes.move_dns_away(replicas.kubectl, lost)
    began = time.monotonic()
    nodes.stop(lost)
    try:
        assert seconds_until_pod(namespace, "after-node-loss", began) < NODE_SECONDS
        assert_untouched(namespace, before)
    finally:
        nodes.start(cluster, lost)
