"""Generated files are current."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ddpjob.client.crd import custom_resource_definition
from tests.install import commands, lessons, schemas
from tests.install.chart import ROOT, Object, of_kind, template
from tests.install.fields import meaning_of
from tests.install.generate import COMMANDS, CRD, OPERATOR, PYTHON, RBAC, SCHEMAS_PAGE, plain_manifests, texts
from tests.prepared import program

AGAIN = "is out of date: run `make generate` and commit the result"


def load(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


@pytest.mark.parametrize(
    ("path", "text"), texts().items(), ids=lambda part: part.stem if isinstance(part, Path) else ""
)
def test_every_generated_file_is_current(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} {AGAIN}"


def test_page_of_the_commands_has_each_of_them() -> None:
    assert sorted(commands.parts_of(COMMANDS.read_text(encoding="utf-8"))) == sorted(commands.names())


def test_no_file_of_a_lesson_that_is_gone_is_left() -> None:
    assert set(lessons.FOLDER.iterdir()) == lessons.jobs().keys()


def test_page_of_the_schemas_is_current() -> None:
    assert SCHEMAS_PAGE.read_text(encoding="utf-8") == schemas.reference(), f"docs/reference/schemas.md {AGAIN}"


@pytest.mark.parametrize("path", sorted(schemas.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_field_of_a_schema_has_a_meaning(path: Path) -> None:
    schema = json.loads(path.read_text(encoding="utf-8"))
    types = schema.get("$defs", {})
    for part in (schema, *types.values()):
        for name, field in part.get("properties", {}).items():
            assert meaning_of(field, types), f"write a docstring below {name}, a field of the model"


def test_every_field_of_the_python_api_has_a_meaning() -> None:
    page = PYTHON.read_text(encoding="utf-8")
    without_meaning = [line for line in page.splitlines() if re.search(r"(?:\|\s*\||\):\s*)$", line)]
    assert without_meaning == [], "write a docstring below the field, or in the property"


def test_the_flow_diagram_names_modules_that_exist() -> None:
    modules = set(re.findall(r">([a-z_]+/[a-z_/]+\.py)<", (ROOT / "docs" / "develop" / "flow.svg").read_text()))
    assert len(modules) >= 8
    packages = (ROOT / "operator" / "ddpjob", ROOT / "operator" / "ddpjob_operator")
    assert [name for name in modules if not any((folder / name).exists() for folder in packages)] == []


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
