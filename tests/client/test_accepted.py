"""A real API server accepts the jobs that the commands for files call valid, and all objects rendered for them."""

from __future__ import annotations

from contextlib import suppress

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cli.init import STARTER
from ddpjob.client.jobfile import documents_of
from ddpjob.convert.conversion import convert
from ddpjob.local.admission import admit
from tests.convert.test_jobs import JOBS, NAMES
from tests.worlds.control_plane import ApiError, ControlPlane

pytestmark = pytest.mark.apiserver
KINDS = {kind.kind: kind for kind in (names.DDPJOBS, names.SERVICES, names.NETWORK_POLICIES, names.CLAIMS, names.PODS)}


def require_accepted(control_plane: ControlPlane, namespace: str, job: Json) -> None:
    """Send the job and its objects with strict validation, and store none of them."""
    placed = job | {"metadata": job["metadata"] | {"namespace": namespace}}
    for body in (placed, *admit(placed).created()):
        path = KINDS[body["kind"]].path(namespace)
        control_plane.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", body)


@pytest.mark.parametrize("name", NAMES)
def test_converted_job_and_its_objects_are_accepted(control_plane: ControlPlane, namespace: str, name: str) -> None:
    with suppress(ApiError):  # it exists; one of the jobs names it
        high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1}
        control_plane.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", high)
    source = documents_of((JOBS / f"{name}.yaml").read_text(encoding="utf-8"))
    require_accepted(control_plane, namespace, convert(source).job)


def test_starter_with_every_field_and_its_objects_are_accepted(control_plane: ControlPlane, namespace: str) -> None:
    head, _, fields = STARTER.partition("apiVersion:")
    (job,) = documents_of("apiVersion:" + fields.replace("\n#", "\n"))
    assert head and "claimTemplate" in job["spec"]["checkpoint"]
    require_accepted(control_plane, namespace, job)
