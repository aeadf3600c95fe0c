"""Generated files are current."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ddpjob.api.crd import as_yaml, custom_resource_definition
from tests.install import commands, decisions, failures, object_schemas, python_reference, schemas
from tests.install.chart import ROOT, Object, of_kind, template
from tests.install.fields import meaning_of, reference
from tests.install.flow import draw
from tests.install.generate import (
    CHART_CRD,
    COMMANDS,
    CRD,
    EXPLANATION,
    FAILURES,
    FIELDS,
    FLOW,
    OBJECTS,
    OPERATOR,
    PYTHON,
    RBAC,
    SCHEMAS,
    SCHEMAS_PAGE,
    explanation,
    json_schema,
    plain_manifests,
    schema_file,
)
from tests.prepared import program

AGAIN = "is out of date: run `make generate` and commit the result"


def load(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


@pytest.mark.parametrize("path", [CRD, CHART_CRD], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_copy_of_the_crd_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == as_yaml(), f"{path.name} {AGAIN}"


def test_field_reference_is_current() -> None:
    assert FIELDS.read_text(encoding="utf-8") == reference(), f"docs/reference/fields.md {AGAIN}"
    assert EXPLANATION.read_text(encoding="utf-8") == explanation(), f"docs/reference/schemas/explanation.json {AGAIN}"
    assert FAILURES.read_text(encoding="utf-8") == failures.reference(), f"docs/reference/failures.md {AGAIN}"


def test_list_of_the_decisions_is_current() -> None:
    assert decisions.INDEX.read_text(encoding="utf-8") == decisions.index(), f"docs/develop/decisions/README.md {AGAIN}"


def test_a_decision_without_a_number_or_a_status_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0001-a.md").write_text("# 0001 A\n\n**Status:** superseded by [0002](0002-b.md).\n\nText.\n")
    assert decisions.index(tmp_path).endswith("- [0001 A](0001-a.md): superseded by [0002](0002-b.md).\n")
    for text in ("# 0001 B\n\n**Status:** accepted.\n\n", "# 0002 B\n\nText.\n"):
        (tmp_path / "0002-b.md").write_text(text)
        with pytest.raises(ValueError, match=r"0002-b\.md does not begin"):
            decisions.index(tmp_path)


def test_page_of_the_commands_has_each_of_them_and_is_current() -> None:
    page = COMMANDS.read_text(encoding="utf-8")
    assert sorted(commands.parts_of(page)) == sorted(commands.names())
    assert page == commands.with_commands(page), f"docs/reference/commands.md {AGAIN}"


def test_schemas_of_the_output_of_commands_are_current() -> None:
    for verb, model in SCHEMAS.items():
        assert schema_file(verb).read_text(encoding="utf-8") == json_schema(model), f"{verb}.json {AGAIN}"
    for name, schema in OBJECTS.items():
        assert schema_file(name).read_text(encoding="utf-8") == object_schemas.text(schema()), f"{name}.json {AGAIN}"


def test_page_of_the_schemas_is_current() -> None:
    assert SCHEMAS_PAGE.read_text(encoding="utf-8") == schemas.reference(), f"docs/reference/schemas.md {AGAIN}"


@pytest.mark.parametrize("path", sorted(schemas.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_field_of_a_schema_has_a_meaning(path: Path) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    types = schema.get("$defs", {})
    for part in (schema, *types.values()):
        for name, field in part.get("properties", {}).items():
            assert meaning_of(field, types), f"write a docstring below {name}, a field of the model"


def test_reference_of_the_python_api_is_current() -> None:
    page = PYTHON.read_text(encoding="utf-8")
    assert page == python_reference.reference(), f"docs/reference/python-reference.md {AGAIN}"
    without_meaning = [line for line in page.splitlines() if re.search(r"(?:\|\s*\||\):\s*)$", line)]
    assert without_meaning == [], "write a docstring below the field, or in the property"


def test_the_flow_diagram_is_current() -> None:
    assert FLOW.read_text(encoding="utf-8") == draw().svg(), f"docs/develop/flow.svg {AGAIN}"


PARTS = ("ddpjob", "ddpjob_operator")


def test_the_flow_diagram_names_modules_that_exist() -> None:
    modules = draw().modules
    assert len(modules) >= 10
    assert [name for name in modules if not any((ROOT / "operator" / part / name).exists() for part in PARTS)] == []


def test_helm_renders_the_crd_unchanged() -> None:
    [rendered] = of_kind(template(), "CustomResourceDefinition")
    assert rendered["spec"] == custom_resource_definition()["spec"]
    assert rendered["metadata"]["name"] == "ddpjobs.ddpjob.dev"


def test_plain_manifests_equal_the_charts_objects() -> None:
    for name, objects in plain_manifests().items():
        assert load(ROOT / "manifests" / name) == objects, f"manifests/{name} {AGAIN}"


def test_plain_namespace_enforces_the_restricted_level() -> None:
    [namespace] = of_kind(load(RBAC), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_plain_manifests_do_not_mention_helm() -> None:
    for path in (RBAC, OPERATOR):
        text = path.read_text(encoding="utf-8").split("\n", 1)[1]
        assert "helm" not in text.lower()


def test_kustomize_builds_the_same_objects() -> None:
    done = subprocess.run(
        [program("kubectl"), "kustomize", str(ROOT / "manifests")],
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    built = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)}
    files = {(item["kind"], item["metadata"]["name"]): item for path in (CRD, RBAC, OPERATOR) for item in load(path)}
    assert built == files
