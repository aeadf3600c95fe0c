"""The CRD is deleted and installed again. This deletes every job, so pytest collects this file last."""

from __future__ import annotations

import time

import pytest

from ddpjob.api import names
from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import Installation
from tests.e2e.namespace import JobNamespace
from tests.e2e.test_operator_loss import seconds_until_pod
from tests.kind import images

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]
CRD_SECONDS = 5.0


def test_single_operator_works_again_after_the_crd_was_deleted_and_installed(
    operator: Installation, namespace: JobNamespace, trials_ended: None
) -> None:
    """Three seconds without the kind are enough for a list of the API groups without it."""
    restarts = operator.pods()[0]["status"]["containerStatuses"][0]["restartCount"]
    seconds_until_pod(namespace, "before", time.monotonic())
    operator.kubectl("delete", "crd", f"{names.DDPJOBS.plural}.{names.GROUP}", "--timeout=60s", timeout=90)
    time.sleep(3)
    operator.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.kubectl("wait", "--for=condition=Established", f"crd/{names.DDPJOBS.plural}.{names.GROUP}")
    assert seconds_until_pod(namespace, "after", time.monotonic()) < CRD_SECONDS
    operator.wait_until_ready()
    assert operator.pods()[0]["status"]["containerStatuses"][0]["restartCount"] == restarts
