"""``--set numNodes=3``: changes one field of the job, by its path below spec, to a value written in YAML."""

import re
from typing import Any

import yaml

from ddpjob.cli import documents, fields
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
Step = str | int
_STEP = re.compile(r'\.?([A-Za-z0-9_/-]+)|\[(\d+)\]|\[(?:"([^"]+)"|\'([^\']+)\')\]')
_ROOTS = ("metadata", "spec")
_EXAMPLES = "for example --set numNodes=3, --set 'args[2]=\"5\"', --set metadata.labels.team=a"


def assign(job: Json, assignment: str) -> None:
    """Carry out one ``--set``; the value ``null`` removes the field.

    Raises:
        LocalError: no such field or entry, or no value.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise LocalError(f"--set {assignment}: there is no =", "it takes FIELD=VALUE", _EXAMPLES)
    steps = _steps(path.strip(), assignment)
    node = _schema_of(steps, assignment)
    _put(job, steps, _value(text, node, assignment), assignment)


def _steps(path: str, assignment: str) -> list[Step]:
    steps: list[Step] = []
    position = 0
    while position < len(path):
        found = _STEP.match(path, position)
        if found is None:
            raise LocalError(
                f'--set {assignment}: "{path[position:]}" is no part of a path', "fields are joined by dots", _EXAMPLES
            )
        name, index, double, single = found.groups()
        steps.append(int(index) if index is not None else name or double or single)
        position = found.end()
    if not steps or isinstance(steps[0], int):
        raise LocalError(f"--set {assignment}: it names no field", "it takes FIELD=VALUE", _EXAMPLES)
    return steps if steps[0] in _ROOTS and len(steps) > 1 else ["spec", *steps]


def _schema_of(steps: list[Step], assignment: str) -> Json:
    node, path = fields.schema(), ""
    for step in steps:
        if isinstance(step, int):
            if node and node.get("type") != "array":
                raise LocalError(f"--set {assignment}: {path} is no list", "[n] is an entry of a list", _EXAMPLES)
            node, path = node.get("items", {}), f"{path}[{step}]"
            continue
        below = fields.child(node, step) if node.get("type") != "array" else None
        if below is None:
            error, hint = fields.no_such_field(path, step, node)
            raise LocalError(
                f"--set {assignment}: {error}", hint, "docs/fields.md lists all; flags of the trainer belong into args"
            )
        node, path = below, f"{path}.{step}" if path else step
    return node


def _value(text: str, node: Json, assignment: str) -> Any:
    try:
        value = yaml.load(text, documents.Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.YAMLError as error:
        raise LocalError(
            f"--set {assignment}: the value is not YAML: {documents.problem(error)}",
            "quotes, brackets and braces mean something in YAML",
            "put the value in quotes, for the shell and for YAML: --set 'field=\"value\"'",
        ) from error
    return _fitting(value, node, text.strip())


def _fitting(value: Any, node: Json, text: str) -> Any:
    """A number where the field takes text is text: ``--set args[2]=5`` means what it says."""
    if node.get("type") == "string" and isinstance(value, int | float):
        return text
    if isinstance(value, list) and node.get("items", {}).get("type") == "string":
        return [str(item) if type(item) is int else item for item in value]
    return value


def _put(job: Json, steps: list[Step], value: Any, assignment: str) -> None:
    place: Any = job
    holder = ""
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            _reach(place, step, holder, assignment)
        elif not isinstance(place, dict):
            raise LocalError(f"--set {assignment}: {holder} is no mapping in this job", "it has no fields", _EXAMPLES)
        if after is None:
            _write(place, step, value)
            return
        if (place.get(step) if isinstance(place, dict) else place[step]) is None:
            place[step] = [] if isinstance(after, int) else {}
        place, holder = place[step], str(step)


def _reach(place: Any, index: int, holder: str, assignment: str) -> None:
    """One past the end is a new entry; anything further would leave holes."""
    if not isinstance(place, list) or index > len(place):
        length = len(place) if isinstance(place, list) else 0
        raise LocalError(
            f"--set {assignment}: {holder} has no entry [{index}]",
            f"it has {length}, counted from 0" if length else "it has none",
            f"--set '{holder}[{length}]=…' adds one" if length else f"--set '{holder}=[a, b]' sets the whole list",
        )
    if index == len(place):
        place.append(None)


def _write(place: Any, step: Step, value: Any) -> None:
    if value is not None:
        place[step] = value
    elif isinstance(step, int):
        del place[step]
    else:
        place.pop(step, None)
