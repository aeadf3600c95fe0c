"""Write every generated file: ``make generate``.

models → manifests/crd.yaml → the chart's copy; models → docs/reference/fields.md, docs/reference/schemas;
docs/reference/schemas → docs/reference/schemas.md;
table of failures → docs/reference/failures.md; options of `ddpjob` → parts of docs/reference/commands.md;
docstrings → docs/reference/python-reference.md;
decisions → docs/develop/decisions/README.md;
lessons → manifests/examples/lessons, diffs and pictures of docs/concepts/torch-distributed;
manifests/examples/train.py → ddprun-script.yaml beside it;
chart → manifests/rbac.yaml, operator.yaml. Tests in this folder compare each file with what this module writes.
"""

import json
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml
from pydantic import BaseModel

from ddpjob.cli.output import RunLine
from ddpjob.client.bundle.archive import Manifest
from ddpjob.client.checkup import Checkup
from ddpjob.client.crd import as_yaml
from ddpjob.client.log_lines import PrintedLine
from ddpjob.client.profile import Profile
from ddpjob.client.ranks import RankTable
from ddpjob.client.stacks import StackTable
from ddpjob.client.timeline import Description
from ddpjob.client.validation import Validation
from ddpjob.client.verdict.explanation import Explanation
from ddpjob.client.volume.contents import Pulled, VolumeContents
from tests.install import (
    commands,
    decisions,
    failures,
    guide,
    lessons,
    object_schemas,
    python_reference,
    schemas,
)
from tests.install.chart import NAMESPACE, ROOT, Object, template
from tests.install.fields import reference
from tests.kind import prepare

CRD = ROOT / "manifests" / "crd.yaml"
CHART_CRD = ROOT / "charts" / "ddpjob" / "files" / "crd.yaml"
FIELDS = ROOT / "docs" / "reference" / "fields.md"
FAILURES = ROOT / "docs" / "reference" / "failures.md"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
PYTHON = ROOT / "docs" / "reference" / "python-reference.md"
SCHEMAS_PAGE = ROOT / "docs" / "reference" / "schemas.md"
EXPLANATION = schemas.FOLDER / "explanation.json"
SCHEMAS: dict[str, type[BaseModel]] = {
    "run": RunLine,
    "validate": Validation,
    "describe": Description,
    "bundle": Manifest,
    "doctor": Checkup,
    "checkpoints": VolumeContents,
    "pull": Pulled,
    "top": RankTable,
    "stacks": StackTable,
    "profile": Profile,
    "logs": PrintedLine,
}
"""What commands print with ``-o json``, by the name of the command."""
OBJECTS = {
    "ddpjob": object_schemas.job_or_jobs,
    "submit": object_schemas.submitted,
    "render": object_schemas.objects,
}
"""Schemas of objects as the API server has them, by the name of the file."""
NAMED = {"why": "explanation", "get": "ddpjob"}
"""The names of the other files."""
SCRIPT = ROOT / "manifests" / "examples" / "train.py"
JOB_OF_SCRIPT = SCRIPT.with_name("ddprun-script.yaml")
RBAC = ROOT / "manifests" / "rbac.yaml"
OPERATOR = ROOT / "manifests" / "operator.yaml"

_HEAD = "# Generated from charts/ddpjob by `make generate`; do not edit.\n"
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
_HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")


def namespace() -> Object:
    """Return the operator's namespace for `kubectl apply`, with Pod Security `restricted`. Helm creates its own."""
    modes = ("enforce", "warn", "audit")
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            "labels": {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in modes},
        },
    }


def plain_manifests() -> dict[str, list[Object]]:
    """Return the objects of the chart's defaults without Helm's labels, by file name."""
    objects = [without_helm(item) for item in template({"crds.install": False, "crds.keep": False}, hooks=False)]
    rights = [item for item in objects if item["kind"] in _RIGHTS]
    others = [item for item in objects if item["kind"] not in _RIGHTS]
    return {RBAC.name: [namespace(), *rights], OPERATOR.name: others}


def without_helm(item: Object) -> Object:
    """Return the object without the labels that Helm adds."""
    labels = {key: value for key, value in item["metadata"].get("labels", {}).items() if key not in _HELM_LABELS}
    return item | {"metadata": item["metadata"] | {"labels": labels}}


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes no YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(objects: list[Object]) -> str:
    return _HEAD + "---\n" + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)


def texts() -> dict[Path, str]:
    """Return the text of each generated file that needs no other program. schemas.py reads the written schemas."""
    found = {CRD: as_yaml(), CHART_CRD: as_yaml(), FIELDS: reference(), FAILURES: failures.reference()}
    found |= {
        COMMANDS: commands.with_commands(COMMANDS.read_text(encoding="utf-8")),
        PYTHON: python_reference.reference(),
    }
    found |= {EXPLANATION: explanation(), JOB_OF_SCRIPT: job_of_script()}
    found |= {schema_file(verb): json_schema(model) for verb, model in SCHEMAS.items()}
    found |= {schema_file(name): object_schemas.text(schema()) for name, schema in OBJECTS.items()}
    return found | {decisions.INDEX: decisions.index()} | lessons.jobs()


def explanation() -> str:
    """Return the JSON schema of ``ddpjob why -o json``."""
    schema = Explanation.model_json_schema(by_alias=True, mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | schema | {"additionalProperties": False}, indent=2) + "\n"


def schema_file(verb: str) -> Path:
    """Return the file of the JSON schema of ``ddpjob VERB -o json``."""
    return EXPLANATION.with_name(f"{NAMED.get(verb, verb)}.json")


def json_schema(model: type[BaseModel]) -> str:
    """Return the JSON Schema of what a command prints with ``-o json``."""
    return json.dumps(schemas.described(model.model_json_schema(by_alias=True)), indent=2) + "\n"


def job_of_script() -> str:
    """Return the DDPJob of the script that users copy, with the script as it is now in the ConfigMap."""
    head, mark, rest = JOB_OF_SCRIPT.read_text(encoding="utf-8").partition("  train.py: |\n")
    _, end, job = rest.partition("---\napiVersion")
    return f"{head}{mark}{indent(SCRIPT.read_text(encoding='utf-8'), '    ')}{end}{job}"


def main() -> None:
    """Write all generated files. Those that need Helm come last, so the others are written if Helm is missing."""
    EXPLANATION.parent.mkdir(exist_ok=True)
    lessons.FOLDER.mkdir(exist_ok=True)
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    SCHEMAS_PAGE.write_text(schemas.reference(), encoding="utf-8")
    guide.write()
    prepare.ensure("helm")
    for name, objects in plain_manifests().items():
        (ROOT / "manifests" / name).write_text(_text(objects), encoding="utf-8")
        print(f"wrote manifests/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
