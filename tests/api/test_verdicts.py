"""Compare the API server's verdicts (schema and CEL) with pydantic's on one table of specs and of edits."""

from collections.abc import Callable
from typing import Any

import pytest

from ddpjob.api import names
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS, OK, Bad, Edit
from tests.worlds.control_plane import ApiError, ControlPlane

pytestmark = pytest.mark.apiserver
Apply = Callable[[str, dict[str, Any]], str]
STRICT = "fieldValidation=Strict"


@pytest.fixture
def apply(control_plane: ControlPlane, namespace: str) -> Apply:
    """Create or replace a job with the strict validation of ``kubectl apply``. Return why it is refused, or ""."""

    def run(name: str, spec: dict[str, Any]) -> str:
        job: dict[str, Any] = {
            "apiVersion": names.API_VERSION,
            "kind": "DDPJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {key: value for key, value in spec.items() if value is not None},
        }
        jobs = names.DDPJOBS.path(namespace)
        existing = {item["metadata"]["name"]: item for item in control_plane.request("GET", jobs)["items"]}
        try:
            if name in existing:
                job["metadata"]["resourceVersion"] = existing[name]["metadata"]["resourceVersion"]
                control_plane.request("PUT", f"{jobs}/{name}?{STRICT}", job)
            else:
                control_plane.request("POST", f"{jobs}?{STRICT}", job)
        except ApiError as error:
            return str(error)
        return ""

    return run


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_api_server_accepts_what_pydantic_accepts(apply: Apply, spec: dict[str, Any]) -> None:
    assert apply("job", spec) == ""


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_api_server_refuses_what_pydantic_refuses_with_a_reason(apply: Apply, bad: Bad) -> None:
    refusal = apply(bad.name, bad.spec)
    assert refusal, "accepted"
    assert bad.field.split(".")[-1] in refusal
    assert bad.says in refusal


@pytest.mark.parametrize("edit", ILLEGAL_EDITS, ids=lambda edit: edit.id)
def test_edit_of_an_immutable_field_is_refused_on_a_live_job(apply: Apply, edit: Edit) -> None:
    assert apply("job", OK | edit.before) == ""
    refusal = apply("job", OK | edit.after)
    assert refusal, "accepted"
    assert f"{edit.field} is immutable" in refusal


@pytest.mark.parametrize("edit", LEGAL_EDITS, ids=lambda edit: edit.id)
def test_edit_of_a_mutable_field_is_accepted_on_a_live_job(apply: Apply, edit: Edit) -> None:
    assert apply("job", OK | edit.before) == ""
    assert apply("job", OK | edit.after) == ""
