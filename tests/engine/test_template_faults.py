"""Any template that the CRD accepts gives pods or a refusal with the field name, never a crash."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.merge import template_faults
from tests.builders import SETTINGS, a_job, a_started_world

TEMPLATE = {
    "metadata": {"labels": {"team": "vision"}},
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "A", "value": "b"}],
                "envFrom": [{"secretRef": {"name": "s"}}],
                "ports": [{"name": "web", "containerPort": 80}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                "securityContext": {"runAsUser": 7},
            },
            {"name": "side", "image": "side:1"},
        ],
        "initContainers": [{"name": "first", "image": "first:1"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "imagePullSecrets": [{"name": "pull"}],
        "securityContext": {"fsGroup": 7},
    },
}
odd = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70_000) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "a"]), inner, max_size=2),
    max_leaves=4,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return a strategy for everything below the pod's spec."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(found for key, child in inner for found in paths(child, (*path, key)))]


def changed(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    template = copy.deepcopy(TEMPLATE)
    holder: Any = template["spec"]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return template


@given(place=st.sampled_from(paths(TEMPLATE["spec"])), value=odd)
def test_template_is_rendered_or_refused_with_the_field_name(place: tuple[Any, ...], value: Any) -> None:
    body = a_job(template=changed(place, value))
    try:
        job = Job.of(body)
    except ValidationError:
        return  # the CRD refuses it too
    if faults := template_faults(job.spec.wire()["template"]):
        assert all(fault.startswith("spec.template.spec") for fault in faults)
    else:
        assert len(desired_pods(job, 1, SETTINGS)) == 2


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (("volumes",), [{"name": []}], "spec.template.spec.volumes[0].name: must be a string"),
        (("volumes",), "v", "spec.template.spec.volumes: must be a list"),
        (("containers", 0, "ports"), [3], "spec.template.spec.containers[0].ports[0]: must be an object"),
        (
            ("containers", 1, "securityContext"),
            1,
            "spec.template.spec.containers[1].securityContext: must be an object",
        ),
    ],
)
def test_template_fault_is_in_the_status_and_no_pod_is_created(place: tuple[Any, ...], value: Any, fault: str) -> None:
    world = a_started_world(a_job(template=changed(place, value)))
    assert world.status["state"] == "Invalid" and not world.pods
    assert fault in world.condition("Stalled")["message"]
