"""What an administrator does: install, prove it, apply the plain manifests, uninstall and install again."""

import json

import pytest

from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import JOB_KIND
from tests.e2e.reference import ReferenceRun
from tests.kind.images import OPERATOR_TAG

pytestmark = [pytest.mark.kind, pytest.mark.timeout(400, func_only=True)]


def test_helm_test_passes(operator: Installation) -> None:
    assert "Succeeded" in operator.helm("test", "ddpjob", "--timeout=120s")


def test_the_plain_manifests_are_accepted_by_the_api_server(operator: Installation) -> None:
    # Server-side apply, because the chart's release owns some of the same objects; nothing is stored.
    said = operator.kubectl(
        "apply", "--kustomize", str(ROOT / "manifests"), "--server-side", "--force-conflicts", "--dry-run=server"
    )
    assert "customresourcedefinition.apiextensions.k8s.io/ddpjobs.ddpjob.dev" in said
    assert "deployment.apps/ddpjob-operator" in said


def test_jobs_and_their_definition_outlive_the_release_and_meet_the_next_one(
    reference: ReferenceRun, operator: Installation
) -> None:
    before = reference.namespace.job(reference.name)

    operator.uninstall()

    assert operator.kubectl.objects("deployments") == []
    assert reference.namespace.job(reference.name) == before
    operator.install(OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    operator.wait_until_ready()
    assert operator.kubectl.object("customresourcedefinition", JOB_KIND)["status"]["acceptedNames"]["shortNames"]
    after = reference.namespace.job(reference.name)
    assert after == before, f"a finished job is left as it is: {json.dumps(after['status'])}"
