"""The in-memory cluster enforces the rules of the CRD; tests/worlds/contract compares it with a real API server."""

from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.spec import IMMUTABLE
from ddpjob.client.crd import openapi
from ddpjob_operator.cluster.base import Invalid
from tests.api.specs import BAD, ILLEGAL_EDITS, OK, Edit
from tests.worlds.memory import MemoryCluster


def a_job(spec: dict[str, Any] | None = None, name: str = "job") -> dict[str, Any]:
    identity = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}}
    return identity | {"spec": {key: value for key, value in (spec or OK).items() if value is not None}}


def edited(edit: Edit) -> None:
    server = MemoryCluster().server
    server.create(names.DDPJOBS, "default", a_job(OK | edit.before))
    before = {key: None for key in edit.before if key not in edit.after}
    server.patch(names.DDPJOBS, "default", "job", {"spec": before | edit.after})


def test_every_cel_rule_of_the_crd_is_enforced_in_python() -> None:
    """Rules are written twice. One without its check in Python would hold in a cluster but not in local mode."""
    refusals = []
    for bad in BAD:
        with pytest.raises(Invalid) as caught:
            MemoryCluster().server.create(names.DDPJOBS, "default", a_job(bad.spec, bad.name))
        refusals.append(str(caught.value))
    for edit in ILLEGAL_EDITS:
        with pytest.raises(Invalid) as caught:
            edited(edit)
        refusals.append(str(caught.value))
    messages = set(cel_messages(openapi()))
    assert len(messages) > len(IMMUTABLE)
    assert [message for message in messages if not any(message in refusal for refusal in refusals)] == []


def cel_messages(schema: dict[str, Any]) -> Iterator[str]:
    """The messages of all CEL rules in a schema."""
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if isinstance(child, dict):
            yield from cel_messages(child)
