"""Checks YAML without a cluster: each problem of each DDPJob with line, field and hint.

The rules are the models of the API and what rendering needs, as for the API server and the operator. This module has no
rule of its own.
"""

from collections.abc import Iterator
from typing import Literal

import yaml

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.spec import Location, field_path, without
from ddpjob.client.jobfile import (
    beginning,
    head_mistakes,
    node_at,
    objects_of,
    unknown_fields,
    without_server_fields,
)
from ddpjob.client.jobspec import too_small
from ddpjob.engine.mistakes import mistakes
from ddpjob.errors import DDPJobError, InvalidJobError
from ddpjob.local.admission import Fault, admit, faults

Severity = Literal["error", "warning"]
_DEVICES = {
    "gpu": "nvidia.com/gpu",
    **{f"{of}{end}/gpu": f"{of}.com/gpu" for of in ("nvidia", "amd") for end in ("", ".com")},
}
"""By what is written in their place. Device plugins of others have names such as nvidia.com/gpumem."""


class FileProblem(WireModel):
    """A problem. An API server or the operator refuses an error; a warning is a probable mistake that they accept."""

    severity: Severity
    line: int | None = None
    """Line of the field, or of the nearest object around a field that is missing; counted from 1."""
    column: int | None = None
    """Column, counted from 1."""
    job: str | None = None
    """Name of the DDPJob."""
    field: str | None = None
    """Path of the field, for example `spec.env[0].name`; absent if the problem is not about a single field."""
    message: str
    hint: str | None = None


class CheckedJob(WireModel):
    """A DDPJob of a file."""

    name: str | None = None
    namespace: str | None = None
    line: int


class CheckedFile(WireModel):
    """A file, and what is wrong with it."""

    file: str
    """The file as it was named; `-` is standard input."""
    jobs: list[CheckedJob]
    ignored: list[str]
    """Objects of other kinds, as `Kind name`. They are not checked."""
    problems: list[FileProblem]


class Validation(WireModel):
    """The output of `ddpjob validate -o json`."""

    valid: bool
    """Whether no file has an error; warnings do not matter."""
    files: list[CheckedFile]


def validate(file: str, text: str) -> CheckedFile:
    """Return what is wrong with the DDPJobs of a YAML text; a text without a DDPJob is wrong, too."""
    jobs: list[CheckedJob] = []
    ignored: list[str] = []
    problems: list[FileProblem] = []
    for document, node, mark in objects_of(text):
        if isinstance(document, InvalidJobError):
            line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
            problems.append(
                FileProblem(severity="error", line=line, column=column, message=document.error, hint=document.hint)
            )
            continue
        metadata = document.get("metadata") or {}
        if document.get("kind") == names.DDPJOBS.kind:
            job = CheckedJob(
                name=_text(metadata.get("name")), namespace=_text(metadata.get("namespace")), line=_line(node)
            )
            jobs.append(job)
            problems += (_problem(node, job.name, found) for found in _of_job(document))
        elif (wrong := _misnamed(document)) is not None:
            problems.append(_problem(node, _text(metadata.get("name")), wrong))
        else:
            kind = document.get("kind") or "a document without kind"
            ignored.append(" ".join(f"{kind} {metadata.get('name') or ''}".split()))
    if not jobs and not problems:
        hint = f"it contains {', '.join(ignored) or 'nothing'}; {beginning(ignored)}"
        problems.append(FileProblem(severity="error", message="there is no DDPJob in it", hint=hint))
    problems.sort(key=lambda problem: problem.line or 0)
    return CheckedFile(file=file, jobs=jobs, ignored=ignored, problems=problems)


def refused(file: str, error: DDPJobError) -> CheckedFile:
    """Return the result for a file that cannot be read."""
    problem = FileProblem(severity="error", message=error.error, hint=error.hint or None)
    return CheckedFile(file=file, jobs=[], ignored=[], problems=[problem])


def _of_job(document: Json) -> Iterator[Fault]:
    """Yield the problems of a DDPJob. Those of its known fields are found also if it has unknown ones."""
    is_whole = True
    for location, mistake in head_mistakes(document):
        is_whole = is_whole and location == ("apiVersion",)
        yield Fault(location, mistake.error, mistake.hint)
    if not is_whole:
        return
    written = without_server_fields(document)
    unknown = list(unknown_fields(written))
    for location, mistake in unknown:
        yield Fault(location, "there is no such field", mistake.hint)
    known = without(written, [location for location, _ in unknown])
    found = faults(known)
    yield from found
    if not found:
        yield from (Fault(*warning, is_warning=True) for warning in _warnings(known))


def _warnings(document: Json) -> Iterator[tuple[Location, str, str]]:
    """Yield location, message and hint of probable mistakes that are allowed."""
    try:
        job = admit(document).job
    except InvalidJobError as error:  # it has no faults: it is the job of another controller
        yield ("spec", "managedBy"), error.error, error.hint
        return
    yield from ((("spec", mistake.field), mistake.message, "") for mistake in mistakes(job))
    for kind, resources in (document["spec"].get("resources") or {}).items():
        if isinstance(resources, dict) and (size := too_small(resources.get("memory"))):
            place, hint = ("spec", "resources", kind, "memory"), f'did you mean "{size}"?'
            yield place, f"{resources['memory']} is less than 1 MiB", hint
        for name in resources or ():
            if (meant := _DEVICES.get(name.lower().removesuffix("s"), name)) != name:
                place, hint = ("spec", "resources", kind, name), f'did you mean "{meant}"?'
                yield place, f"no known device is named {name}", hint
    if job.spec.num_nodes > 1 and job.spec.checkpoint is None and job.spec.restart_policy.max_restarts != 0:
        lost = "without checkpoint each restart begins the training again, and each node that is lost causes one"
        yield ("spec",), lost, "docs/tasks/write-a-job.md describes the volume"


def _misnamed(document: Json) -> Fault | None:
    """Return the problem of an object that is meant to be a DDPJob."""
    kind, version = str(document.get("kind") or ""), str(document.get("apiVersion") or "")
    if version.partition("/")[0] != names.GROUP and kind.lower() != names.DDPJOBS.kind.lower():
        return None
    message = f"{names.GROUP} has no kind {kind}" if kind else "kind is missing"
    return Fault(("kind",), message, f"kind: {names.DDPJOBS.kind}")


def _problem(root: yaml.Node, job: str | None, found: Fault) -> FileProblem:
    _, mark = node_at(root, found.location)
    return FileProblem(
        severity="warning" if found.is_warning else "error",
        line=mark.line + 1,
        column=mark.column + 1,
        job=job,
        field=field_path("", found.location).removeprefix(".") or None,
        message=found.message,
        hint=found.hint or None,
    )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _text(value: object) -> str | None:
    return None if value is None else str(value)
