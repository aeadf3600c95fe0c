"""Compare the API server's verdicts (schema and CEL) with pydantic's on one table of specs and of edits."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from ddpjob.api import names
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS, OK, Bad, Edit

pytestmark = pytest.mark.apiserver
Apply = Callable[[str, dict[str, Any]], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def apply(control_plane: Any, namespace: str) -> Apply:
    """Apply a job with ``kubectl apply`` and its strict validation."""

    def run(name: str, spec: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        job = {
            "apiVersion": names.API_VERSION,
            "kind": "DDPJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {key: value for key, value in spec.items() if value is not None},
        }
        done: subprocess.CompletedProcess[str] = control_plane.kubectl(
            "apply", "--validate=strict", "-f", "-", input=json.dumps(job), check=False
        )
        return done

    return run


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_api_server_accepts_what_pydantic_accepts(apply: Apply, spec: dict[str, Any]) -> None:
    done = apply("job", spec)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_api_server_refuses_what_pydantic_refuses_with_a_reason(apply: Apply, bad: Bad) -> None:
    done = apply(bad.name, bad.spec)
    assert done.returncode != 0, "accepted"
    assert bad.field.split(".")[-1] in done.stderr, done.stderr
    assert bad.says in done.stderr, done.stderr


@pytest.mark.parametrize("edit", ILLEGAL_EDITS, ids=lambda edit: edit.id)
def test_edit_of_an_immutable_field_is_refused_on_a_live_job(apply: Apply, edit: Edit) -> None:
    created = apply("job", OK | edit.before)
    assert created.returncode == 0, created.stderr
    done = apply("job", OK | edit.after)
    assert done.returncode != 0, "accepted"
    assert f"{edit.field} is immutable" in done.stderr, done.stderr


@pytest.mark.parametrize("edit", LEGAL_EDITS, ids=lambda edit: edit.id)
def test_edit_of_a_mutable_field_is_accepted_on_a_live_job(apply: Apply, edit: Edit) -> None:
    assert apply("job", OK | edit.before).returncode == 0
    done = apply("job", OK | edit.after)
    assert done.returncode == 0, done.stderr
