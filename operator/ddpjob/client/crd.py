"""Print the CustomResourceDefinition: ``python -m ddpjob.client.crd > manifests/crd.yaml``.

A test fails if manifests/crd.yaml or the chart's copy differs from the output.
"""

import sys
from collections.abc import Sequence
from typing import Any

import yaml

from ddpjob.api import names
from ddpjob.api.spec import NAME_RULE, DDPJobSpec
from ddpjob.api.status import DDPJobStatus

Schema = dict[str, Any]

_CONVERTED = ("$ref", "additionalProperties", "anyOf", "const", "description", "items", "properties", "x-list-keys")
_LEFT_OUT = ("$defs", "title")

DESCRIPTION = (
    "DDPJob runs one PyTorch data-parallel training: numNodes pods, each with nprocPerNode processes, restarted as "
    "a group from rank 0's last checkpoint until it succeeds or the restart budget is spent."
)


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False, description: str = "") -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


_RUNNING = '.status.conditions[?(@.type=="Running")]'
COLUMNS = (
    _column("State", ".status.state", description="State of the job"),
    _column("Nodes", ".status.nodesReady", description="Running or succeeded pods / desired pods"),
    _column("Progress", ".status.progress.display", description="Finished optimizer steps"),
    _column("Loss", ".status.progress.loss", description="Mean loss of the last reported step"),
    _column("Restarts", ".status.restarts", "integer", description="Restarts of the group, with new pods and in place"),
    _column("Age", ".metadata.creationTimestamp", "date", description="Time since the job was created"),
    _column("In-Place", ".status.restartsInPlace", "integer", wide=True, description="Those that were in place"),
    _column("Steps/s", ".status.progress.stepsPerSecond", wide=True, description="Optimizer steps per second"),
    _column("World", ".status.world.worldSize", "integer", wide=True, description="Total number of processes"),
    _column("Reason", _RUNNING + ".reason", wide=True, description="Why the job is in this state"),
)


def openapi() -> dict[str, Any]:
    """Return the structural schema of a DDPJob."""
    return {
        "description": DESCRIPTION,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {names.API_VERSION}."},
            "kind": {"type": "string", "description": f"Always {names.DDPJOBS.kind}."},
            "metadata": {"type": "object"},
            "spec": structural(DDPJobSpec.model_json_schema(by_alias=True)),
            "status": _open(structural(DDPJobStatus.model_json_schema(by_alias=True))),
        },
        "x-kubernetes-validations": [NAME_RULE.wire()],
    }


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as an object, ready to apply."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.DDPJOBS.plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.DDPJOBS.kind,
                "listKind": "DDPJobList",
                "plural": names.DDPJOBS.plural,
                "singular": "ddpjob",
                "shortNames": ["ddp"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [dict(column) for column in COLUMNS],
                    "schema": {"openAPIV3Schema": openapi()},
                }
            ],
        },
    }


def structural(schema: Schema) -> Schema:
    """Return the structural schema for the output of a model's ``model_json_schema(by_alias=True)``.

    A structural schema has no ``$ref``, no ``anyOf`` with null and no titles. The API server drops unknown fields
    except where a node preserves them.
    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
    """
    return _node(schema, schema.get("$defs", {}))


# What the API server needs: a key of a list must be required.
_KEPT_IN_STATUS = ("description", "type", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")


def _open(node: Schema, keys: Sequence[str] = ()) -> Schema:
    """Return a structural schema without enums, limits and required fields, in which all objects may have more fields.

    The API server refuses a whole patch for one value that the schema does not allow, also in a field that the patch
    does not change. An operator of another release must be able to write its status: ``api/status.py`` has the limits.
    ``keys``: the fields that identify the object in its list.
    """
    out = {key: node[key] for key in _KEPT_IN_STATUS if key in node}
    if keys:
        out["required"] = list(keys)
    if node.get("type") == "object":
        out["x-kubernetes-preserve-unknown-fields"] = True
    if "properties" in node:
        out["properties"] = {name: _open(child) for name, child in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _open(node["additionalProperties"])
    if "items" in node:
        out["items"] = _open(node["items"], node.get("x-kubernetes-list-map-keys", ()))
    return out


def _node(node: Schema, defs: Schema) -> Schema:
    node = _flat(node, defs)
    out: Schema = {}
    if description := node.get("description"):
        out["description"] = " ".join(description.split())
    out |= {key: node[key] for key in sorted(node.keys() - {*_CONVERTED, *_LEFT_OUT}) if node[key] is not None}
    if "const" in node:
        out["enum"] = [node["const"]]
    if out.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in node:
        out["properties"] = {name: _node(child, defs) for name, child in node["properties"].items()}
    extra = node.get("additionalProperties")
    if extra is True:
        out["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, dict):
        out["additionalProperties"] = _node(extra, defs)
    if "items" in node:
        out["items"] = _node(node["items"], defs)
        keys = _flat(node["items"], defs).get("x-list-keys")
        out["x-kubernetes-list-type"] = "map" if keys else "atomic"
        if keys:
            out["x-kubernetes-list-map-keys"] = keys
    return out


def _flat(node: Schema, defs: Schema) -> Schema:
    """Return ``node`` with its reference resolved and its null alternative removed; keys of ``node`` itself win."""
    here = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        return _flat(defs[node["$ref"].rsplit("/", 1)[-1]], defs) | here
    if "anyOf" in node:
        others = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(others) == 1:
            return _flat(others[0], defs) | here
    return here


class Dumper(yaml.SafeDumper):
    """Writes repeated parts out in full, because not every reader of manifests supports YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml() -> str:
    """Return the CRD as the YAML text that is committed."""
    text: str = yaml.dump(custom_resource_definition(), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Printed by `python -m ddpjob.client.crd`; do not edit.\n---\n{text}"


if __name__ == "__main__":
    sys.stdout.write(as_yaml())
