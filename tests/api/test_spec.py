"""The spec's models: verdicts on the table of good and bad specs, defaults, and words for a user."""

import pytest
from pydantic import ValidationError

from ddpjob.api.spec import IMMUTABLE, DDPJobSpec, explain
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, OK, Bad


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_a_good_spec_is_accepted(spec: dict[str, object]) -> None:
    DDPJobSpec.model_validate(spec)


@pytest.mark.parametrize("bad", [bad for bad in BAD if not bad.cel_only], ids=lambda bad: bad.id)
def test_a_bad_spec_is_refused_by_name(bad: Bad) -> None:
    with pytest.raises(ValidationError) as caught:
        DDPJobSpec.model_validate(bad.spec)
    lines = explain(caught.value)
    assert any(bad.field.split(".")[-1] in line for line in lines), lines
    assert any(bad.says in line for line in lines), lines


def test_the_table_is_as_long_as_promised() -> None:
    assert len(BAD) >= 30
    assert len({bad.id for bad in BAD}) == len(BAD)


def test_every_immutable_field_has_its_addition_change_and_removal_in_the_table() -> None:
    for field in IMMUTABLE:
        kinds = {edit.id.rsplit(" ", 1)[-1] for edit in ILLEGAL_EDITS if edit.field == field}
        assert {"added", "changed", "removed"} <= kinds, field


def test_defaults_are_those_of_the_design() -> None:
    spec = DDPJobSpec.model_validate(OK)
    assert spec.wire() == {
        "image": "trainer:1",
        "numNodes": 1,
        "nprocPerNode": "auto",
        "rendezvous": {"port": 29500, "timeoutSeconds": 600},
        "sharedMemory": {},
        "podSecurity": {"profile": "Restricted"},
        "restartPolicy": {"maxRestarts": 3},
        "suspend": False,
    }


def test_what_a_template_says_beyond_the_schema_survives() -> None:
    spec = DDPJobSpec.model_validate(GOOD["template with what we do not know"])
    template = spec.wire()["template"]
    assert template["spec"]["dnsPolicy"] == "Default"
    assert template["spec"]["containers"][0]["livenessProbe"] == {"httpGet": {"port": 1}}
    assert template["metadata"]["finalizers"] == ["x/y"]


def test_an_error_names_the_path_as_the_user_wrote_it() -> None:
    with pytest.raises(ValidationError) as caught:
        DDPJobSpec.model_validate(OK | {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]})
    assert explain(caught.value) == ["spec.env[0].valueFrom.secretKeyRef.key: Field required"]
