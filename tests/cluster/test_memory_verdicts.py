"""The in-memory cluster's verdicts on the table of specs and edits that pydantic and the real API server share."""

from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.api.spec import IMMUTABLE
from ddpjob_operator.cluster.base import Invalid
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS, OK, Bad, Edit
from tests.worlds.memory import MemoryCluster


def a_job(spec: dict[str, Any], name: str = "job") -> dict[str, Any]:
    identity = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}}
    return identity | {"spec": {key: value for key, value in spec.items() if value is not None}}


async def edited(edit: Edit) -> None:
    cluster = MemoryCluster()
    await cluster.create(names.DDPJOBS, "default", a_job(OK | edit.before))
    before = {key: None for key in edit.before if key not in edit.after}
    await cluster.patch(names.DDPJOBS, "default", "job", {"spec": before | edit.after})


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
async def test_a_good_spec_is_accepted(spec: dict[str, Any]) -> None:
    await MemoryCluster().create(names.DDPJOBS, "default", a_job(spec))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
async def test_a_bad_spec_is_refused_with_its_field_and_the_text_of_the_rule(bad: Bad) -> None:
    with pytest.raises(Invalid) as caught:
        await MemoryCluster().create(names.DDPJOBS, "default", a_job(bad.spec, bad.name))
    assert bad.field.split(".")[-1] in str(caught.value)
    assert bad.says in str(caught.value)


@pytest.mark.parametrize("edit", ILLEGAL_EDITS, ids=lambda edit: edit.id)
async def test_an_edit_of_an_immutable_field_is_refused(edit: Edit) -> None:
    with pytest.raises(Invalid, match=f"{edit.field} is immutable"):
        await edited(edit)
    assert edit.field in IMMUTABLE


@pytest.mark.parametrize("edit", LEGAL_EDITS, ids=lambda edit: edit.id)
async def test_an_edit_of_a_mutable_field_is_accepted(edit: Edit) -> None:
    await edited(edit)


async def test_every_cel_rule_of_the_crd_is_enforced_in_python() -> None:
    """Rules are written twice. One without its check in Python would hold in a cluster but not in local mode."""
    refusals = []
    for bad in BAD:
        with pytest.raises(Invalid) as caught:
            await MemoryCluster().create(names.DDPJOBS, "default", a_job(bad.spec, bad.name))
        refusals.append(str(caught.value))
    for edit in ILLEGAL_EDITS:
        with pytest.raises(Invalid) as caught:
            await edited(edit)
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
