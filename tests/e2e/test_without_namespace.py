"""A namespace is deleted while jobs run in it and in another one: the others' jobs and pods are not touched.

The operator serves all namespaces, or only these two. Then the Role of the deleted one is gone too, and the API server
refuses all requests for it. The operator's scope changes, so pytest collects this file last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import Installation
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.namespace import DELETE_SECONDS, JobNamespace, job_namespace
from tests.e2e.test_operator_loss import seconds_until_pod
from tests.kind import images
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]
JOBS = ("one", "two")
POD_SECONDS = 5.0
"""A new job has its pod within this time, also while the other namespace is being deleted."""


@pytest.fixture
def doomed(cluster: Cluster, operator: Installation) -> Iterator[JobNamespace]:
    """Make the namespace that the test deletes."""
    with job_namespace(cluster, "doomed") as made:
        yield made


@pytest.fixture(params=["cluster", "namespace"])
def scope(
    request: pytest.FixtureRequest,
    operator: Installation,
    namespace: JobNamespace,
    doomed: JobNamespace,
    trials_ended: None,
) -> Iterator[str]:
    """Let the operator serve all namespaces, or only the two of the test."""
    if request.param == "namespace":
        served = [made.kubectl.namespace for made in (namespace, doomed)]
        operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS, namespaces=served, sweep=5)
        operator.wait_until_ready()
    yield request.param
    operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)


def test_deleted_namespace_disturbs_no_other(
    operator: Installation, namespace: JobNamespace, doomed: JobNamespace, scope: str
) -> None:
    both = (namespace, doomed)
    for made in both:
        made.kubectl.apply(*(shell_job(name, "sleep 600") for name in JOBS))
    for made in both:
        made.until_run(JOBS)
    before, containers = namespace.identities("pods"), operator.containers()

    gone = doomed.kubectl.namespace
    operator.kubectl("delete", "namespace", gone, "--wait=false")
    assert seconds_until_pod(namespace, "during", time.monotonic()) < POD_SECONDS
    operator.kubectl("wait", "--for=delete", f"namespace/{gone}", f"--timeout={DELETE_SECONDS:g}s", timeout=150)
    operator.wait_until_ready()
    if scope == "namespace":
        sample = "ddpjob_namespace_served", f'namespace="{gone}"'
        until("the operator knows that the namespace is gone", lambda: operator.metrics()[sample] == 0, seconds=60)
    assert seconds_until_pod(namespace, "after", time.monotonic()) < POD_SECONDS
    (service,) = namespace.kubectl.objects("services", f"--selector=ddpjob.dev/job-name={JOBS[0]}")
    namespace.kubectl("delete", "service", service["metadata"]["name"])
    until(
        "the Service is restored", lambda: namespace.kubectl.object("service", service["metadata"]["name"]), seconds=5
    )

    after = namespace.identities("pods")
    assert {name: after.get(name) for name in before} == before
    for name in JOBS:
        status = namespace.status(name)
        assert (status["state"], status["attempt"], status.get("failures", [])) == ("Running", 1, [])
    assert operator.containers() == containers
