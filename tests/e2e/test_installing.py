"""Install the chart, run its test, apply the plain manifests, uninstall and install again."""

import json

import pytest

from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import JOB_KIND
from tests.e2e.reference import ReferenceRun
from tests.kind.images import OPERATOR_TAG

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


@pytest.mark.soak
def test_helm_test_passes(operator: Installation) -> None:
    assert "Succeeded" in operator.helm("test", "ddpjob", "--timeout=120s")


@pytest.mark.soak
def test_api_server_accepts_the_plain_manifests(operator: Installation) -> None:
    # Server-side apply, because the chart's release owns some of the same objects; nothing is stored.
    said = operator.kubectl(
        "apply", "--kustomize", str(ROOT / "manifests"), "--server-side", "--force-conflicts", "--dry-run=server"
    )
    assert "customresourcedefinition.apiextensions.k8s.io/ddpjobs.ddpjob.dev" in said
    assert "deployment.apps/ddpjob-operator" in said


@pytest.mark.soak
def test_uninstalling_keeps_the_crd_and_finished_jobs(
    reference: ReferenceRun, operator: Installation, trials_ended: None
) -> None:
    before = reference.namespace.job(reference.name)

    operator.uninstall()

    assert operator.kubectl.objects("deployments") == []
    assert reference.namespace.job(reference.name) == before
    operator.install(OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.wait_until_ready()
    assert operator.kubectl.object("customresourcedefinition", JOB_KIND)["status"]["acceptedNames"]["shortNames"]
    after = reference.namespace.job(reference.name)
    assert after == before, f"the new release changed a finished job: {json.dumps(after['status'])}"
