"""Generate docs/schemas.md: what commands print with ``-o json``, from the files of docs/schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from ddpjob.api.spec import DDPJobSpec
from ddpjob.api.status import DDPJobStatus
from ddpjob.cli.main import application
from tests.install.chart import ROOT
from tests.install.fields import Schema, cell, in_order_of_use, meaning_of, plain, type_of

FOLDER = ROOT / "docs" / "schemas"
HEAD = """\
# Output of commands as JSON

<!-- Generated from docs/schemas by `make generate`; do not edit. -->

What commands print with `-o json`. Each section is a JSON schema, a file in [schemas](schemas) against which programs
can check output. *Required* fields are always there; others are absent or null if they are not known. Programs match on
fields and words, never on sentences. A later release may have more fields and words.
"""
_MEANINGS = {
    "attempt": "Number of the attempt.",
    "began": "Time of its first row, in seconds since 1970.",
    "checkpointStep": "Step of the last checkpoint.",
    "column": "Column, counted from 1.",
    "conditions": "The conditions of its status.",
    "detail": "Why it is in this state.",
    "error": "What is wrong, and where.",
    "evaluations": "The evaluations on the test set.",
    "exitCode": "Exit code of the command.",
    "files": "What was found in each file.",
    "hint": "The usual cause.",
    "job": "Name of the job.",
    "jobs": "The DDPJobs in it.",
    "kind": "Kind of the object.",
    "lastTransitionTime": "When the status of the condition last changed.",
    "learningRate": "Learning rate of the step.",
    "line": "The line without the line feed.",
    "marks": "What happened, by time.",
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
    "reachedStep": "The last step that it computed.",
    "reason": "Why, in one CamelCase word (docs/failures.md).",
    "resumedFromStep": "Step of the checkpoint from which the attempt continued.",
    "run": "Number of the run.",
    "runs": "Each start of the training.",
    "seconds": "How long the command ran.",
    "severity": "error: the job is refused. warning: a probable mistake.",
    "since": "When this state began.",
    "state": "State in one word (docs/status.md).",
    "status": "True, False or Unknown.",
    "step": "Finished optimizer steps.",
    "steps": "The training as if it had never been interrupted, step by step.",
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
        for name, field in part.get("properties", {}).items():
            meaning = _MEANINGS.get(name) or status["properties"].get(name, {}).get("description")
            if meaning and "description" not in field and "$ref" not in plain(field):
                field["description"] = meaning
    return schema


def reference() -> str:
    """Return the whole page."""
    elsewhere = _of_the_resource()
    parts, done = [HEAD], dict[str, Schema]()
    for path in sorted(FOLDER.glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        parts += [f"## {path.stem}\n", f"{_commands(path)} Schema: [{path.name}](schemas/{path.name}).\n"]
        types = schema.pop("$defs", {})
        parts += _object(schema, types)
        for name in in_order_of_use({"properties": schema}, types):
            definition = types[name]
            if name.lower() in elsewhere:
                continue
            if name in done:
                if done[name] != definition:
                    raise ValueError(f"docs/schemas has two types {name}: rename the model of one")
                continue
            done[name] = definition
            parts += [f"### {name}\n", *_object(definition, types)]
    text = "\n".join(parts).rstrip() + "\n"
    return re.sub(r"\]\(#(\w+)\)", lambda found: f"]({elsewhere.get(found[1], '')}#{found[1]})", text)


def _commands(path: Path) -> str:
    """Return which commands print this: those whose help names the file, else the one that it is named after."""
    group: Any = get_command(application())
    found = [name for name, command in group.commands.items() if f"docs/schemas/{path.name}" in (command.help or "")]
    return f"Printed by {', '.join(f'`ddpjob {name} -o json`' for name in found or [path.stem])}."


def _of_the_resource() -> dict[str, str]:
    """Return the page of each type that docs/fields.md describes, by the type in lower case."""
    models = (DDPJobSpec, DDPJobStatus)
    types = {name for model in models for name in model.model_json_schema(by_alias=True).get("$defs", {})}
    return {name.lower(): "fields.md" for name in types}


def _object(schema: Schema, types: Schema) -> Iterator[str]:
    """Yield the text and the table of one object, or the alternatives of which it is one."""
    yield " ".join(schema.get("description", "").replace("``", "`").split()) + "\n"
    if "properties" not in schema:
        yield f"One of: {type_of(schema)}.\n" if "anyOf" in schema else f"{type_of(schema)}\n"
        return
    yield "| Field | Type | Required | Meaning |\n|---|---|---|---|"
    for name, field in schema["properties"].items():
        required = "yes" if name in schema.get("required", ()) else ""
        meaning = cell(meaning_of(field, types).replace("``", "`"))
        yield f"| `{name}` | {type_of(field)} | {required} | {meaning} |"
    yield ""
