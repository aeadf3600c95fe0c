"""The fields that a DDPJob has, by the schema of its CRD: for ``--set``, and for mistakes in files.

An API server drops fields that it does not know unless the client asks it to refuse them, as kubectl does. So do we:
a misspelt ``numNode`` would otherwise train on one node without a word.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from ddpjob.api.crd import openapi
from ddpjob.cli.errors import did_you_mean
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
_STRING = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _STRING}
_METADATA = {"name": _STRING, "namespace": _STRING, "labels": _TEXTS, "annotations": _TEXTS}
# The rest of what Kubernetes knows there; it means nothing to a job on one machine.
_OTHER_METADATA = ("finalizers", "generateName", "ownerReferences")
_OPEN = "x-kubernetes-preserve-unknown-fields"


@cache
def schema() -> Json:
    """The schema of what a user may write."""
    whole = openapi()
    known: Json = _METADATA | {name: {_OPEN: True} for name in _OTHER_METADATA}
    whole["properties"]["metadata"] = {"type": "object", "properties": known}
    return whole


def child(node: Json, name: str) -> Json | None:
    """The schema of a field, {} where anything goes, None where there is no such field."""
    if name in node.get("properties", {}):
        found: Json = node["properties"][name]
        return found
    if "additionalProperties" in node:
        extra: Json = node["additionalProperties"]
        return extra
    is_open = not node or node.get(_OPEN) or ("properties" not in node and node.get("type", "object") == "object")
    return {} if is_open else None


def no_such_field(parent: str, name: str, node: Json) -> tuple[str, str]:
    """The error and the hint for a field that does not exist."""
    known = list(node.get("properties", {}))
    if not known:
        return f'{parent} has no fields, so no "{name}"', "it is a single value or a list"
    return f'{parent or "a DDPJob"} has no field "{name}"', did_you_mean(name, known, f"it has {', '.join(known)}")


def check(job: Json, source: str) -> None:
    """Raises ``LocalError`` for the first field of the document that a DDPJob does not have."""
    for error, hint in _unknown(job, schema(), ""):
        raise LocalError(f"{source}: {error}", hint, "docs/fields.md lists every field")


def _unknown(value: Any, node: Json, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            below = child(node, name)
            if below is None:
                yield no_such_field(path, name, node)
            else:
                yield from _unknown(inner, below, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown(inner, node.get("items", {}), f"{path}[{index}]")
