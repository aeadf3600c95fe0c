"""Writes every file that is derived from another: ``make generate``.

models → manifests/crd.yaml → the chart's copy; models → docs/fields.md; flow.py → docs/flow.svg;
chart → manifests/rbac.yaml, operator.yaml. Tests in this folder compare each file with what this module writes.
"""

import sys
from typing import Any

import yaml

from ddpjob.api.crd import as_yaml
from tests.install.chart import NAMESPACE, ROOT, Object, template
from tests.install.fields import reference
from tests.install.flow import draw

CRD = ROOT / "manifests" / "crd.yaml"
CHART_CRD = ROOT / "charts" / "ddpjob" / "files" / "crd.yaml"
FIELDS = ROOT / "docs" / "fields.md"
FLOW = ROOT / "docs" / "flow.svg"
RBAC = ROOT / "manifests" / "rbac.yaml"
OPERATOR = ROOT / "manifests" / "operator.yaml"

_HEAD = "# Generated from charts/ddpjob by `make generate`; do not edit.\n"
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
_HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by")


def namespace() -> Object:
    """The operator's namespace. Helm makes its own; `kubectl apply` needs to be told, and may as well be strict."""
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
    """What the chart's defaults install, without Helm's own labels: file name to objects."""
    objects = [without_helm(item) for item in template({"crds.install": False}, hooks=False)]
    rights = [item for item in objects if item["kind"] in _RIGHTS]
    others = [item for item in objects if item["kind"] not in _RIGHTS]
    return {RBAC.name: [namespace(), *rights], OPERATOR.name: others}


def without_helm(item: Object) -> Object:
    """The object without the labels by which Helm knows its own."""
    labels = {key: value for key, value in item["metadata"].get("labels", {}).items() if key not in _HELM_LABELS}
    return item | {"metadata": item["metadata"] | {"labels": labels}}


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes repeated parts out in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(objects: list[Object]) -> str:
    return _HEAD + "---\n" + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)


def main() -> None:
    """Write them all; those that need Helm come last, so that the others are there if it cannot be built."""
    for path, text in ((CRD, as_yaml()), (CHART_CRD, as_yaml()), (FIELDS, reference()), (FLOW, draw().svg())):
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    for name, objects in plain_manifests().items():
        (ROOT / "manifests" / name).write_text(_text(objects), encoding="utf-8")
        print(f"wrote manifests/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
