"""Turns a pydantic JSON schema into the structural schema that a CustomResourceDefinition takes.

Differences that matter (https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema):
no ``$ref``, no ``anyOf`` with null, no titles; unknown fields are pruned unless a node preserves them.
"""

from typing import Any

Schema = dict[str, Any]

_KEPT = (
    "default",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-validations",
)


def structural(schema: Schema) -> Schema:
    """The structural schema of a model's ``model_json_schema(by_alias=True)``."""
    return _node(schema, schema.get("$defs", {}))


def _node(node: Schema, defs: Schema) -> Schema:
    node = _flat(node, defs)
    out: Schema = {}
    if description := node.get("description"):
        out["description"] = " ".join(description.split())
    out |= {key: node[key] for key in _KEPT if node.get(key) is not None}
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
    """Resolve a reference and drop the null alternative; what stands at the point of use wins."""
    here = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        return _flat(defs[node["$ref"].rsplit("/", 1)[-1]], defs) | here
    if "anyOf" in node:
        others = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(others) == 1:
            return _flat(others[0], defs) | here
    return here
