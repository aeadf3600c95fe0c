"""Every spec that the CRD accepts gives pods or the state Invalid with a reason: planning never raises."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.api.status import DDPJobStatus
from ddpjob.client.crd import openapi
from ddpjob.engine.actions import Plan
from ddpjob.engine.plan import plan
from tests.api.specs import BEYOND_CEL, OK, Bad
from tests.builders import NOW, SETTINGS, World, a_job, a_started_world

# Names that the engine gives a meaning somewhere: as undeclared fields they may hold anything, anywhere.
MEANINGFUL = (
    *("name", "env", "ports", "volumes", "volumeMounts", "imagePullSecrets", "containers", "initContainers", "envFrom"),
    *("tolerations", "securityContext", "capabilities", "seccompProfile", "valueFrom", "resources", "mountPath"),
    *("limits", "requests", "labels", "annotations", "selector", "matchLabels"),
)
keys = st.sampled_from(MEANINGFUL) | st.text(max_size=5) | st.just("k" * 2000) | st.just("<<")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
QUANTITIES = st.sampled_from([0, 1, 8, 65, 2**63 - 1, "4", "500m", "16Gi", "1e3", "1e999999999", "9" * 64, "+.5", "8."])
RESOURCES = st.sampled_from(["cpu", "memory", "storage", "nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb", ""])
MAX_TEXT = 1000


def of_schema(node: Mapping[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Return a strategy for values that a node of the structural schema accepts."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return st.sampled_from(["auto", 1, 2, 64]) if name == "nprocPerNode" else QUANTITIES
    of_type = {"object": _of_object, "array": _of_list, "integer": _of_number, "string": _of_text}
    return st.booleans() if node["type"] == "boolean" else of_type[node["type"]](node)


def _of_number(node: Mapping[str, Any]) -> st.SearchStrategy[int]:
    return st.integers(node.get("minimum", -(2**63)), node.get("maximum", 2**63 - 1))


def _of_list(node: Mapping[str, Any]) -> st.SearchStrategy[list[Any]]:
    least, most = node.get("minItems", 0), min(node.get("maxItems", 3), 3)
    items = st.lists(of_schema(node["items"]), min_size=least, max_size=most)
    if keys_of := node.get("x-kubernetes-list-map-keys"):
        return items.map(lambda found: list({tuple(i[k] for k in keys_of): i for i in found}.values()))
    return items


def _of_text(node: Mapping[str, Any]) -> st.SearchStrategy[str]:
    limit = min(node.get("maxLength", MAX_TEXT), MAX_TEXT)
    if "pattern" in node:
        fixed = ["trainer", "a", "/a", "a" * 63, "/" + "a" * (limit - 1)]
        return st.from_regex(node["pattern"]).map(lambda text: text.rstrip("\n")) | st.sampled_from(fixed)
    text = st.text(
        st.characters(exclude_categories=("Cs",)), min_size=node.get("minLength", 0), max_size=min(limit, 20)
    )
    return text | st.just("x" * limit)


def _of_object(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "additionalProperties" in node:
        values = of_schema(node["additionalProperties"])
        some = RESOURCES | st.text(st.characters(exclude_categories=("Cs",)), max_size=10) | st.just("k" * 317)
        return st.dictionaries(some, values, max_size=min(node.get("maxProperties", 4), 4))
    declared = {key: of_schema(child, key) for key, child in node.get("properties", {}).items()}
    required = set(node.get("required", ()))
    fixed = st.fixed_dictionaries(
        {key: value for key, value in declared.items() if key in required},
        optional={key: value for key, value in declared.items() if key not in required},
    )
    if not node.get("x-kubernetes-preserve-unknown-fields"):
        return fixed
    unknown = st.dictionaries(keys, anything, max_size=3).map(lambda found: _without(found, declared))
    return st.builds(lambda known, more: known | more, fixed, unknown)


def _without(found: dict[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in declared}


SPECS = of_schema(openapi()["properties"]["spec"])


@given(spec=SPECS)
@settings(max_examples=200, deadline=None)
def test_plan_never_raises_and_never_leaves_the_status_empty(spec: dict[str, Any]) -> None:
    job = a_job(**OK | {"numNodes": 2} | spec | {"numNodes": 2})
    world = World(job)
    made = plan(job, world.observed(live=True), NOW, SETTINGS)
    if made == Plan():
        assert spec["managedBy"] not in (None, names.CONTROLLER)
        return
    assert made.status is not None and made.status["state"]
    DDPJobStatus.model_validate(made.status)  # the API server accepts it
    if made.status["state"] == "Invalid":
        assert not made.creates and any(note.reason == "InvalidSpec" for note in made.events)
    elif made.status["state"] == "Queued":
        assert (spec["scheduling"] or {})["schedulingPolicy"]["gang"] == {} and not made.creates
    elif not spec.get("suspend"):
        assert made.creates


@pytest.mark.parametrize("bad", BEYOND_CEL, ids=lambda bad: bad.id)
def test_what_cel_cannot_refuse_is_invalid_with_the_reason(bad: Bad) -> None:
    world = a_started_world(a_job(**bad.spec))
    assert world.status["state"] == "Invalid" and not world.pods
    assert bad.says in world.condition("Stalled")["message"]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"volumes": [{"name": []}]}, "spec.template.spec.volumes[0].name: must be a string"),
        ({"volumes": "v"}, "spec.template.spec.volumes: must be a list"),
        ({"containers": [{"name": "trainer", "ports": [3]}]}, "containers[0].ports[0]: must be an object"),
        ({"containers": [{"name": "a", "securityContext": 1}]}, "containers[0].securityContext: must be an object"),
    ],
)
def test_template_fault_is_in_the_status_and_no_pod_is_created(spec: dict[str, Any], fault: str) -> None:
    world = a_started_world(a_job(template={"spec": spec}))
    assert world.status["state"] == "Invalid" and not world.pods
    assert fault in world.condition("Stalled")["message"]


DEEPEST = """
import json, threading
from ddpjob_operator.controller.main import allow_deep_objects
from ddpjob.engine.observed import Observed
from ddpjob.engine.plan import plan
from tests.builders import NOW, SETTINGS, a_job

allow_deep_objects()
text = json.dumps(a_job(template={"spec": {"affinity": {}}})).replace('"affinity": {}', '"affinity": ' + NESTED)

def read():
    made = plan(json.loads(text), Observed(), NOW, SETTINGS)
    print(made.status["state"], made.events[0].message)

read()
thread = threading.Thread(target=read)
thread.start()
thread.join()
"""


def test_deepest_object_that_an_api_server_stores_is_invalid_too() -> None:
    nested = "'{\"a\":' * 9990 + '1' + '}' * 9990"
    program = DEEPEST.replace("NESTED", nested)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["Invalid spec: nested deeper than 100 levels"] * 2


@pytest.mark.parametrize("where", ["volumes", "env", "imagePullSecrets", "tolerations", "initContainers"])
@pytest.mark.parametrize("value", [[5], ["a"], [None], [{"name": []}], [{"name": 1}], [[]], "text", 5])
def test_undeclared_field_named_like_a_merged_list_is_passed_on(where: str, value: Any) -> None:
    trainer = {"name": "trainer", "securityContext": {where: value}}
    world = a_started_world(a_job(template={"spec": {"containers": [trainer], "securityContext": {where: value}}}))
    pod = world.pod(0)
    for context in (pod["spec"]["securityContext"], pod["spec"]["containers"][0]["securityContext"]):
        assert context[where] == value
