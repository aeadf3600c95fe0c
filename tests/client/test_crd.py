"""The generated CRD: structural, with all descriptions, and equal to the committed file."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpjob.api.limits import MAX_JOB_NAME, MAX_NODES
from ddpjob.api.names import pod_name
from ddpjob.api.spec import IMMUTABLE, OPEN_PARTS
from ddpjob.client.crd import as_yaml, openapi

ROOT = Path(__file__).parents[2]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_committed_crd_matches_the_models() -> None:
    assert (ROOT / "manifests/crd.yaml").read_text() == as_yaml()


def test_every_field_has_a_description() -> None:
    schema = openapi()
    bare = [
        f"{path}.{name}"
        for path, node in nodes(schema)
        for name, child in node.get("properties", {}).items()
        if not child.get("description") and f"{path}.{name}" != ".metadata"
    ]
    assert bare == []


def test_the_schema_of_a_users_file_is_that_of_the_crd_without_the_docstrings() -> None:
    """Seen: to read the docstrings took half of the CPU time of ``ddpjob run``."""
    source = "from ddpjob.client.jobfile import schema; from ddpjob.api.model import descriptions; import json; "
    source += "print(json.dumps(schema()), descriptions.cache_info().misses, sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    found, read = map(json.loads, printed.stdout.splitlines())
    for _, node in (*nodes(found), *nodes(whole := openapi())):
        node.pop("description", None)
    assert (found["properties"] | {"metadata": {}}, read) == (whole["properties"] | {"metadata": {}}, 0)


def test_the_schema_is_structural() -> None:
    for path, node in nodes(openapi()):
        assert "$ref" not in node and "title" not in node, path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path


def test_lists_and_texts_of_the_spec_are_bounded() -> None:
    """The API server estimates the cost of CEL rules from the maxima, and refuses rules without them."""
    spec = openapi()["properties"]["spec"]
    for path, node in nodes(spec):
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path


def test_every_immutable_field_has_a_transition_rule_of_the_spec() -> None:
    rules = [rule["rule"] for rule in openapi()["properties"]["spec"]["x-kubernetes-validations"]]
    for field in IMMUTABLE:
        new, old = (f"has({of}.{field})" for of in ("self", "oldSelf"))
        assert any(new in rule and old in rule and "==" in rule for rule in rules), field


def test_parts_that_cel_cannot_compare_are_hashed_and_have_no_defaults() -> None:
    """So neither a field nor a default of another release changes ``specHash``."""
    parts = [f".{'.'.join(path)}" for path in OPEN_PARTS]
    covered = []
    for path, node in nodes(openapi()["properties"]["spec"]):
        of = [part for part in parts if path == part or path.startswith((f"{part}.", f"{part}["))]
        if node.get("x-kubernetes-preserve-unknown-fields"):
            assert of, f"no digest covers {path}"
            covered += of
        if of:
            assert "default" not in node, path
    assert set(covered) == set(parts)


def test_status_schema_refuses_nothing_that_another_release_may_write() -> None:
    allowed = {"description", "type", "properties", "additionalProperties", "items", "required"}
    allowed |= {"x-kubernetes-preserve-unknown-fields", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
    required = {}
    for path, node in nodes(openapi()["properties"]["status"]):
        assert node.keys() <= allowed, (path, node.keys() - allowed)
        assert (node["type"] == "object") == (node.get("x-kubernetes-preserve-unknown-fields") is True), path
        if "required" in node:
            required[path] = node["required"]
    assert required == {".conditions[]": ["type"]}, "the API server needs the keys of a list, and nothing else"


def test_longest_job_name_gives_a_valid_host_name() -> None:
    assert len(pod_name("a" * MAX_JOB_NAME, "12345678", 99_999, MAX_NODES - 1)) <= 63
