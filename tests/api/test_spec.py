"""The spec models: verdicts on the table of good and bad specs, defaults, and error messages."""

import copy

import pytest
from pydantic import ValidationError

from ddpjob.api.spec import IMMUTABLE, DDPJobSpec, explain, forbidden_changes, is_job_name, parse_spec
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS, OK, Bad, Edit


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_a_good_spec_is_accepted(spec: dict[str, object]) -> None:
    DDPJobSpec.model_validate(spec)


@pytest.mark.parametrize("bad", [bad for bad in BAD if not bad.cel_only], ids=lambda bad: bad.id)
def test_bad_spec_is_refused_with_the_name_of_the_field(bad: Bad) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec({"spec": bad.spec})
    lines = explain(caught.value)
    assert any(bad.field.split(".")[-1] in line for line in lines), lines
    assert any(bad.says in line for line in lines), lines


RESTART_POLICY = {"maxTotalRestarts": 100}


def test_table_adds_changes_and_removes_every_immutable_field() -> None:
    for field in IMMUTABLE:
        kinds = {edit.id.rsplit(" ", 1)[-1] for edit in ILLEGAL_EDITS if edit.field == field}
        wanted = {"added", "removed"} if field == "launcher" else {"added", "changed", "removed"}  # it has one value
        assert wanted <= kinds, field


def test_undeclared_template_fields_are_kept() -> None:
    spec = DDPJobSpec.model_validate(GOOD["template with what we do not know"])
    template = spec.wire()["template"]
    assert template["spec"]["dnsPolicy"] == "Default"
    assert template["spec"]["containers"][0]["livenessProbe"] == {"httpGet": {"port": 1}}
    assert template["metadata"]["finalizers"] == ["x/y"]


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]},
            ["spec.env[0].valueFrom.secretKeyRef.key: required field is missing"],
        ),
        ({"restartPolicy": {"retries": 2}}, ["spec.restartPolicy.retries: unknown field"]),
        (
            {"numNodes": 0, "suspend": "yes"},
            ["spec.numNodes: must be greater than or equal to 1", "spec.suspend: must be a valid boolean"],
        ),
    ],
)
def test_error_has_the_path_of_the_field_and_what_is_wrong(spec: dict[str, object], lines: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec({"spec": OK | spec})
    assert explain(caught.value) == lines


LATER = OK | {
    "compression": "none",
    "rendezvous": {"port": 3000, "backend": {"name": "static"}},
    "env": [{"name": "A"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "version": None}}}],
    "template": {"generation": 1, "spec": {"later": 1, "containers": [{"name": "c", "env": [{"name": "A", "b": 2}]}]}},
}
"""A spec with fields of a later release, at every depth."""


def test_fields_of_another_release_are_left_out_on_request() -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec({"spec": LATER})
    assert sorted(explain(caught.value)) == [
        "spec.compression: unknown field",
        "spec.env[1].valueFrom.secretKeyRef.version: unknown field",
        "spec.rendezvous.backend: unknown field",
        "spec.template.generation: unknown field",
        "spec.template.spec.containers[0].env[0].b: unknown field",
    ]
    before = copy.deepcopy(LATER)
    spec = parse_spec({"spec": LATER}, ignore_unknown=True).wire()
    assert before == LATER, "the stored spec is not changed"
    assert spec["rendezvous"]["port"] == 3000 and "backend" not in spec["rendezvous"]
    assert spec["env"] == [{"name": "A"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    # The pod template passes on what it does not know, except in the parts that the schema describes completely.
    assert spec["template"] == {"spec": {"later": 1, "containers": [{"name": "c", "env": [{"name": "A"}]}]}}
    assert "compression" not in spec


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"numNodes": 0}, "spec.numNodes: must be greater than or equal to 1"),
        ({"image": None}, "spec: image is required: set spec.image, or template.spec.containers[name=trainer].image"),
    ],
    ids=["limit", "rule"],
)
def test_errors_other_than_unknown_fields_remain(spec: dict[str, object], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec({"spec": LATER | spec}, ignore_unknown=True)
    assert explain(caught.value) == [line]


def test_null_in_a_declared_field_means_absent() -> None:
    spec = parse_spec({"spec": GOOD["null in declared fields"]}).wire()
    assert spec["rendezvous"] == {"port": 29500, "progressPort": 29501, "timeoutSeconds": 60}
    assert spec["restartPolicy"] == RESTART_POLICY
    assert spec["resources"] == {"limits": {"cpu": 1}}
    assert spec["template"] == {"spec": {"nodeSelector": {"a": "b"}}}


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.cel_only], ids=lambda bad: bad.id)
def test_job_name_that_is_invalid_in_pod_names_is_refused(bad: Bad) -> None:
    assert not is_job_name(bad.name)


def test_job_name_of_maximum_length_is_accepted() -> None:
    assert is_job_name("a" * 44 + "1")
    assert not is_job_name("a\n")


@pytest.mark.parametrize("edit", ILLEGAL_EDITS, ids=lambda edit: edit.id)
def test_a_change_of_an_immutable_field_is_reported(edit: Edit) -> None:
    (message,) = forbidden_changes(stored(edit.before), stored(edit.after))
    assert message.startswith(f"{edit.field} is immutable: delete the job")


@pytest.mark.parametrize("edit", LEGAL_EDITS, ids=lambda edit: edit.id)
def test_a_change_of_a_mutable_field_is_not_reported(edit: Edit) -> None:
    assert forbidden_changes(stored(edit.before), stored(edit.after)) == []


def test_true_and_one_in_a_template_are_different_values() -> None:
    old, new = ({"template": {"spec": {"anyField": value}}} for value in (True, 1))
    assert len(forbidden_changes(old, new)) == 1


def stored(spec: dict[str, object]) -> dict[str, object]:
    """Return the minimal spec with these fields, as the API server stores it."""
    return parse_spec({"spec": OK | spec}).wire()
