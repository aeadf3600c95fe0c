"""The JSON schemas of objects of Kubernetes that commands print: DDPJobs as the CRD describes them, and lists."""

from __future__ import annotations

import json
from typing import Any

from ddpjob.api import names
from ddpjob.client.crd import openapi

Schema = dict[str, Any]
_METADATA: Schema = {
    "type": "object",
    "description": "Name, namespace, labels and others, as of every object of Kubernetes.",
    "required": ["name"],
    "properties": {"name": {"type": "string", "description": "Name of the object."}},
}


_OBJECT: Schema = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata"],
    "properties": {
        "apiVersion": {"type": "string", "description": "Version of its API."},
        "kind": {"type": "string", "description": "Kind of the object."},
        "metadata": _METADATA,
    },
}


def job_or_jobs() -> Schema:
    """Return the schema of a DDPJob, and of a list of them."""
    one = {"$ref": "#/$defs/DDPJob"}
    several = {"$ref": "#/$defs/DDPJobList"}
    return {
        "description": "A DDPJob, or several: the list of `ddpjob get`. With --watch each line is a DDPJob.",
        "$defs": {"DDPJob": _job(), "DDPJobList": _list("The jobs.", one)},
        "anyOf": [one, several],
    }


def submitted() -> Schema:
    """Return the schema of a DDPJob, and of the objects that are created with it."""
    one = {"$ref": "#/$defs/DDPJob"}
    several = {"$ref": "#/$defs/DDPJobWithOthers"}
    kind = {"enum": ["ConfigMap", "Secret"], "description": "Kind of the object."}
    other = _OBJECT | {
        "description": "The Secret with the files of the job, or a ConfigMap or Secret of its YAML.",
        "properties": _OBJECT["properties"] | {"kind": kind},
    }
    items = {"anyOf": [{"$ref": "#/$defs/OtherObject"}, one]}
    return {
        "description": "A DDPJob. With --dry-run client, a list if the job has files or its YAML has other objects.",
        "$defs": {
            "DDPJob": _job(),
            "OtherObject": other,
            "DDPJobWithOthers": _list("The objects; the job is the last.", items),
        },
        "anyOf": [one, several],
    }


def objects() -> Schema:
    """Return the schema of a list of objects of any kind."""
    what = "What the operator would create for the first attempt of a job."
    return _list("The objects.", _OBJECT) | {"description": what}


def _job() -> Schema:
    job = _plain(openapi())
    job["properties"] |= _head(names.API_VERSION, names.DDPJOBS.kind) | {"metadata": _METADATA}
    job["properties"]["spec"]["description"] = "The desired training (docs/reference/fields.md)."
    job["properties"]["status"]["description"] = "The observed state (docs/reference/fields.md)."
    job["required"] = ["apiVersion", "kind", "metadata", "spec"]
    found: Schema = job
    return found


def text(schema: Schema) -> str:
    """Return the text of the file."""
    return json.dumps(schema, indent=2) + "\n"


def _head(version: str, kind: str) -> Schema:
    return {
        "apiVersion": {"const": version, "description": f"Always {version}."},
        "kind": {"const": kind, "description": f"Always {kind}."},
    }


def _list(what: str, items: Schema) -> Schema:
    properties = _head("v1", "List") | {"items": {"type": "array", "description": what, "items": items}}
    return {"description": "A list.", "type": "object", "required": list(properties), "properties": properties}


def _plain(value: Any) -> Any:
    """Return a schema of Kubernetes without its extensions, which JSON Schema does not have."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if not key.startswith("x-kubernetes-")}
