"""The CRD is deleted and installed again. This deletes every job, so pytest collects this file near the end.

Kubernetes deletes all DDPJobs with the CRD, and the garbage collector deletes what they own. The users' part is to
apply their jobs again. Everything else must stay: claims, pods without an owner, the operator's pod.
"""

from __future__ import annotations

import time

import pytest

from ddpjob.api import names
from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import Installation
from tests.e2e.jobs import shell_job, sleeping_pod
from tests.e2e.kubectl import until
from tests.e2e.namespace import JobNamespace, shared_claim
from tests.e2e.test_operator_loss import seconds_until_pod
from tests.kind import images

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]
JOBS = [f"job-{number}" for number in range(10)]
BYSTANDER = "bystander"
CRD = f"{names.DDPJOBS.plural}.{names.GROUP}"
CRD_SECONDS = 5.0
"""A new job has its pod within this time after the CRD is established."""
AGAIN_SECONDS = 90.0
"""A job applied again waits for the pods of the deleted one, which the garbage collector may find up to 30 s later."""


def test_jobs_applied_again_run_after_the_crd_was_deleted_and_nothing_else_is_touched(
    operator: Installation, namespace: JobNamespace, trials_ended: None
) -> None:
    """Three seconds without the kind are enough for a list of the API groups without it."""
    checkpoint = {"mountPath": "/checkpoints", "claimTemplate": {"spec": shared_claim()["spec"]}}
    jobs = [shell_job(name, "sleep 600", checkpoint=checkpoint if name == JOBS[0] else None) for name in JOBS]
    bystander = sleeping_pod(BYSTANDER)
    bystander["metadata"]["labels"] = {names.LABEL_JOB_NAME: JOBS[0], names.LABEL_ATTEMPT: "1"}
    namespace.kubectl.apply(bystander, *jobs)
    namespace.until_run(JOBS)
    before, kept = namespace.identities(), kept_objects(namespace, operator)

    operator.kubectl("delete", "crd", CRD, "--timeout=60s", timeout=90)
    time.sleep(3)
    operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.kubectl("wait", "--for=condition=Established", f"crd/{CRD}")
    assert seconds_until_pod(namespace, "after", time.monotonic()) < CRD_SECONDS
    namespace.kubectl.apply(*jobs)
    namespace.until_run(JOBS, seconds=AGAIN_SECONDS)

    former = before.keys() - {BYSTANDER}
    until(
        "pods and Services of the deleted jobs are gone", lambda: not former & namespace.identities().keys(), seconds=60
    )
    assert namespace.identities()[BYSTANDER] == before[BYSTANDER]
    for name in JOBS:
        status = namespace.status(name)
        assert (status["attempt"], status["restarts"], status.get("failures", [])) == (1, 0, [])
    assert kept_objects(namespace, operator) == kept
    operator.wait_until_ready()


def kept_objects(namespace: JobNamespace, operator: Installation) -> list[object]:
    """Return what identifies the claims and the operator's containers."""
    return [namespace.identities("persistentvolumeclaims"), operator.containers()]
