"""Rendering: no value can change the structure, and every string is unchanged in the pod."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import DictLoader, UndefinedError

from ddpjob.engine import template
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.template import render
from tests.builders import SETTINGS, a_job

HOSTILE = [
    '"}\nhostNetwork: true',
    "{{ 7*7 }}",
    "{% for x in y %}",
    "no",
    "null",
    "~",
    "1e3",
    "0x1F",
    "2001-01-01",
    "- a\n- b",
    "&anchor *alias",
    "!!python/object:os.system",
    "#comment",
    "a: b",
    "\ttab",
    " leading and trailing ",
    "",
    "\x7f\x85\u2028\u2029\ufeff",
    "\U0001f600 é 漢字",
    "'\"\\\n\r\x00\x1b",
    "\ue0000\ue000",  # what the renderer itself writes in the place of the first value
    "x" * 5000,
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=200))


def trainer(**spec: Any) -> dict[str, Any]:
    job = a_job(**spec)
    pods = desired_pods(Job.of(job), 1, SETTINGS)
    pod = pods[-1].body
    assert "hostNetwork" not in pod["spec"]
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container | {"labels": pod["metadata"]["labels"]}


@given(value=texts)
@settings(max_examples=300, deadline=None)
def test_any_string_is_rendered_unchanged(value: str) -> None:
    container = trainer(
        env=[{"name": "A", "value": value}],
        args=[value, value],
        command=[value],
        template={"metadata": {"labels": {"k": value[:63]}, "annotations": {"a": value}}},
    )
    assert next(v for v in container["env"] if v["name"] == "A")["value"] == value
    assert container["args"] == [value, value]
    assert container["command"] == [value]
    assert container["labels"]["k"] == value[:63]


def test_undefined_name_is_an_error_with_the_name() -> None:
    with pytest.raises(UndefinedError, match="selector"):
        render("service.yaml.j2")


@pytest.mark.parametrize("value", [value for value in HOSTILE if len(value) < 317])  # longer keys the API refuses
def test_label_key_with_special_characters_stays_a_key(value: str) -> None:
    labels = {f"k{value}": "v"}
    values = {"claim": "s", "namespace": "n", "owners": [], "spec": {}}
    assert render("claim.yaml.j2", labels=labels, **values)["metadata"]["labels"] == labels


def test_rendered_object_is_independent_of_the_next() -> None:
    first = render("service.yaml.j2", selector={}, port=1)
    first["ports"].clear()
    first["type"] = "changed"
    second = render("service.yaml.j2", selector={}, port=2)
    assert second["ports"] == [{"name": "rendezvous", "port": 2, "targetPort": 2}]
    assert second["type"] == "ClusterIP"


@pytest.mark.parametrize("line", ["a: b {{ x }}", "a: 'b {{ x }}'", "b {{ x }}: c"])
def test_value_inside_a_string_of_a_template_is_an_error(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = template._environment().overlay(loader=DictLoader({"t": line}))
    monkeypatch.setattr(template, "_environment", lambda: environment)
    with pytest.raises(TypeError, match="a value must be a whole key or value"):
        render("t", x="value")
