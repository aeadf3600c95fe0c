"""Each command that ``ddpjob why``, conditions and failures advise can be run with the role ``edit`` of a namespace."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddpjob.engine import advice
from ddpjob.engine.advice import BY_ADMINISTRATOR

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "operator/ddpjob"
_MODULES = [path for folder in ("client/verdict", "engine") for path in (_PACKAGE / folder).rglob("*.py")]
_NAMES = {"limitrange": "limitranges", "quota": "resourcequotas", "pvc": "persistentvolumeclaims", "ddp": "ddpjobs"}
_BUILT_IN = {
    **{key: {"get", "list"} for key in ("limitranges", "resourcequotas", "namespaces", "events", "pods/log")},
    **{key: {"get", "list", "delete", "deletecollection"} for key in ("pods", "persistentvolumeclaims")},
}
"""What the role ``edit`` of Kubernetes 1.29 to 1.36 allows, of what is advised."""
_VERBS = {"get": ["get"], "describe": ["get", "list"], "logs": ["get"], "delete": ["delete"]}
_COMMAND = re.compile(r"kubectl (\w+) ([\w,.-]+)([^;]*)")


def _allowed() -> dict[str, set[str]]:
    """Return verbs by resource: those of Kubernetes, and those that the chart adds to ``edit``."""
    found = {name: set(verbs) for name, verbs in _BUILT_IN.items()}
    for each in yaml.safe_load_all((_ROOT / "manifests/rbac.yaml").read_text(encoding="utf-8")):
        if "rbac.authorization.k8s.io/aggregate-to-edit" in each["metadata"].get("labels", {}):
            for rule in each["rules"]:
                for resource in rule["resources"]:
                    found.setdefault(resource, set()).update(rule["verbs"])
    return found


def _refused(text: str) -> list[str]:
    """Return the commands of a text that ``edit`` does not allow and that no administrator is asked to run."""
    allowed, refused = _allowed(), []
    for part in text.split(";"):
        for found in _COMMAND.finditer(part.partition(BY_ADMINISTRATOR)[0]):
            verb, kinds, rest = found.groups()
            resources = ["pods/log"] if verb == "logs" else [_NAMES.get(k, k) for k in kinds.split(",")]
            resources = [r if r in allowed or r.endswith("s") else f"{r}s" for r in resources]
            may = all(set(_VERBS.get(verb, ["-"])) <= allowed.get(resource, set()) for resource in resources)
            if not may or " -A" in rest:
                refused.append(found[0])
    return refused


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in code, but for docstrings, with X for each value that is no constant of ``advice``."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(map(_text, node.values))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return str(vars(advice).get(ast.unparse(part.value), "X"))
    return str(ast.literal_eval(part))


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.relative_to(_PACKAGE).as_posix())
def test_a_user_with_edit_can_run_each_advised_command(path: Path) -> None:
    """Seen: ``kubectl describe nodes`` and ``kubectl get storageclass``, which are Forbidden with that role."""
    texts = [text for text in _texts(ast.parse(path.read_text(encoding="utf-8"))) if "kubectl " in text]
    assert [command for text in texts for command in _refused(text)] == []
