"""Specs that the API server accepts and no pod can be made from: the job is Invalid, and all others go on."""

import json
import sys
from collections.abc import Iterator

import pytest

from ddpjob.api import names
from tests.api.specs import BEYOND_CEL, Bad
from tests.controller.jobs import Jobs
from tests.controller.operator_process import OperatorProcess
from tests.processes import eventually

pytestmark = pytest.mark.apiserver


@pytest.fixture
def reads_deep_json() -> Iterator[None]:
    """Let the test itself read the deep job."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(limit)


def create(jobs: Jobs, levels: int) -> None:
    """Create the job ``deep``, whose template has this many levels."""
    spec = {"image": "i", "template": {"spec": {"affinity": {}}}}
    meta = {"name": "deep", "namespace": jobs.namespace}
    body = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": meta, "spec": spec}
    nested = '{"a":' * levels + "1" + "}" * levels
    text = json.dumps(body).replace('"affinity": {}', f'"affinity": {nested}')
    jobs.plane.kubectl("create", "--validate=false", "-f", "-", input=text)


@pytest.mark.parametrize("bad", BEYOND_CEL, ids=lambda bad: bad.id)
def test_spec_that_cel_cannot_refuse_is_created_and_invalid(jobs: Jobs, operator: OperatorProcess, bad: Bad) -> None:
    del operator
    jobs.submit(**bad.spec)
    jobs.wait_for("Invalid")
    assert bad.says in jobs.condition("Stalled")["message"]
    assert not jobs.pods()


@pytest.mark.parametrize("levels", [2_000, pytest.param(9_000, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("reads_deep_json")
def test_deepest_job_does_not_stop_the_others(jobs: Jobs, operator: OperatorProcess, levels: int) -> None:
    create(jobs, levels)
    eventually("the deep job is Invalid", lambda: jobs.status("deep").get("state") == "Invalid")
    jobs.submit("other")
    jobs.wait_for_pods(1, "other")
    operator.kill()
    operator.start()
    jobs.submit("later")
    jobs.wait_for_pods(1, "later")
