"""Generate docs/reference/schemas.md from the files of docs/reference/schemas: what commands print with ``-o json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.main import get_command

from ddpjob.api.status import DDPJobStatus
from ddpjob.cli.main import application
from tests.install.chart import ROOT
from tests.install.fields import Schema, cell, plain

FOLDER = ROOT / "docs" / "reference" / "schemas"
HEAD = """\
# Output of commands as JSON

<!-- Generated from docs/reference/schemas by `make generate`; do not edit. -->

Each file of [schemas](schemas) is a JSON Schema of what commands print with `-o json`, with type and meaning of every
field. Required fields, in **bold**, are always there; others are absent or null if they are not known. Match on fields
and words, never on sentences. A later release may have more fields and words.

| Schema | Printed by | Content | Fields |
|---|---|---|---|"""
_MEANINGS = {
    "attempt": "Number of the attempt.",
    "checkpointStep": "Step of the last checkpoint.",
    "column": "Column, counted from 1.",
    "conditions": "The conditions of its status.",
    "detail": "Why it is in this state.",
    "error": "What is wrong, and where.",
    "exitCode": "Exit code of the command.",
    "files": "What was found in each file.",
    "hint": "The usual cause.",
    "job": "Name of the job.",
    "jobs": "The DDPJobs in it.",
    "kind": "Kind of the object.",
    "lastTransitionTime": "When the status of the condition last changed.",
    "line": "The line without the line feed.",
    "maxRestarts": "Restarts after which the job fails.",
    "message": "What happened, for a person.",
    "metrics": "Path of the metrics on this machine.",
    "name": "Name of the object.",
    "namespace": "Namespace of the job.",
    "next": "What to do: a command, or a field to change.",
    "node": "Rank of the node.",
    "nodes": "The nodes of the attempt.",
    "pod": "Name of its pod.",
    "pods": "The pods that there still are.",
    "problems": "What is wrong with it, by line.",
    "rank": "Rank of the node.",
    "reason": "Why, in one CamelCase word (docs/reference/failures.md).",
    "resumedFromStep": "Step of the checkpoint from which the attempt continued.",
    "run": "Number of the run.",
    "seconds": "How long the command ran.",
    "severity": "error: the job is refused. warning: a probable mistake.",
    "since": "When this state began.",
    "state": "State in one word (docs/reference/status.md).",
    "status": "True, False or Unknown.",
    "step": "Finished optimizer steps.",
    "text": "What happened, for a person.",
    "time": "When it was printed: RFC 3339.",
    "type": "What this line or object is.",
}
"""What fields mean in every schema whose model does not say it. What is missing here is a field of the status."""


def described(schema: Schema) -> Schema:
    """Return a schema with the meaning of every field, for fields named as in the status from there."""
    status = DDPJobStatus.model_json_schema(by_alias=True)
    for part in ("TimeSpent", "Progress", "World", "Nodes", "CurrentAttempt"):
        status["properties"] |= status["$defs"][part]["properties"]
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("x-list-keys", None)  # for the CRD alone
        for name, field in part.get("properties", {}).items():
            meaning = _MEANINGS.get(name) or status["properties"].get(name, {}).get("description")
            if meaning and "description" not in field and "$ref" not in plain(field):
                field["description"] = meaning
    return schema


def reference() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(_row(path) for path in sorted(FOLDER.glob("*.json")))]) + "\n"


def _row(path: Path) -> str:
    """Return the row of a schema: which commands print it, what it is, and the names of its fields."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    types = schema.get("$defs", {})
    alternatives = [types[part["$ref"].rsplit("/", 1)[-1]] for part in schema.get("anyOf", ()) if "$ref" in part]
    fields = {name: False for part in (schema, *alternatives) for name in part.get("properties", {})}
    for name in fields:
        fields[name] = all(name in part.get("required", ()) for part in alternatives or [schema])
    names = ", ".join(f"**`{name}`**" if required else f"`{name}`" for name, required in fields.items())
    commands = ", ".join(f"`{name}`" for name in _commands(path))
    meaning = cell(schema.get("description", "").replace("``", "`"))
    return f"| [{path.name}](schemas/{path.name}) | {commands} | {meaning} | {names} |"


def _commands(path: Path) -> list[str]:
    """Return which commands print this: those whose help names the file, else the one that it is named after."""
    group: Any = get_command(application())
    named = f"docs/reference/schemas/{path.name}"
    found = [name for name, command in group.commands.items() if named in (command.help or "")]
    return found or [path.stem]
