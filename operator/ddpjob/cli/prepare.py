"""Prepares a run: applies the options of ``ddpjob run`` to the job of the file and admits the result.

Holds ``--set``, also for ``submit``, and ``--volume``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ddpjob.api.objects import Json
from ddpjob.cli.options import NewJob, RunOptions
from ddpjob.client import jobfile
from ddpjob.client.jobfile import JobFile, Loader, child, require_known_fields, schema, yaml_problem
from ddpjob.client.jobspec import with_words
from ddpjob.engine.mistakes import mistakes
from ddpjob.errors import DDPJobError, did_you_mean
from ddpjob.local import LocalError
from ddpjob.local.admission import AdmittedJob, admit
from ddpjob.local.pod_process import ENTRYPOINT
from ddpjob.local.resources import visible_gpus
from ddpjob.local.state import HostPaths, StateFolder

Part = str | int
"""One part of a field's path: the name of a field, or the index of a list's entry."""
_PART = re.compile(r'\.?([A-Za-z0-9_/-]+)|\[(\d+)\]|\[(?:"([^"]+)"|\'([^\']+)\')\]')
_ROOTS = ("metadata", "spec")
_EXAMPLES = "for example --set numNodes=3, --set 'args[2]=\"5\"', --set metadata.labels.team=a"


class Prepared(NamedTuple):
    """What to run."""

    file: JobFile
    admitted: AdmittedJob
    paths: HostPaths


def prepare(request: RunOptions) -> Prepared:
    """Return the admitted job with every change that the options make. Raises ``LocalError``."""
    file = read_changed(request)
    if not file.job["metadata"].get("name"):
        raise LocalError(f"{request.source}: metadata.name is missing", "every job needs a name", "add --name NAME")
    admitted = admit(file.job)
    paths = HostPaths(admitted.job, StateFolder(), _volumes(request.volumes or (), admitted.claims))
    return Prepared(file, admitted, paths)


def read_changed(new: NewJob, *, image: str | None = None, namespace: str | None = None) -> JobFile:
    """Return the job with the short words of the options, and then what ``--set`` assigns.

    The arguments of a script come after ``spec.args``, also if ``--set`` replaces these.
    """
    size: list[Part] = ["spec", "numNodes"]
    if new.checkpoint and size in [_parts(text.partition("=")[0].strip()) for text in new.assignments or ()]:
        raise LocalError(
            "--set numNodes=… beside --checkpoint", "how a new volume is mounted depends on the nodes", "use --nodes N"
        )
    script_args = new.script_args or ()
    file = jobfile.read(new.source, script_args, new.launcher)
    file.job["spec"] = with_words(file.job["spec"], new.words | {"image": image})
    head = {"metadata.name": new.name, "metadata.namespace": namespace}
    for assignment in (
        *(f"{path}={value}" for path, value in head.items() if value is not None),
        *(new.assignments or ()),
    ):
        assign(file.job, assignment)
    if file.script is None:
        jobfile.append_args(file.job, script_args)
    return file


def _volumes(given: Sequence[str], claims: Sequence[str]) -> Mapping[str, Path]:
    """Return claim name to directory for each ``--volume CLAIM=DIR``. Raises ``LocalError``."""
    volumes: dict[str, Path] = {}
    for text in given:
        claim, equals, directory = text.partition("=")
        path = Path(directory).expanduser().absolute()
        if not equals or not directory:
            raise LocalError(
                f"--volume {text}: =DIR is missing", "--volume takes CLAIM=DIR", "--volume my-claim=./mine"
            )
        if claim not in claims:
            hint = did_you_mean(claim, claims, f"claims of the job: {', '.join(claims) or 'none'}")
            raise LocalError(f"--volume {text}: the job mounts no claim {claim}", hint, "name a claim of the job")
        if not path.is_dir():
            # Not created, so that a typo cannot look like an empty volume.
            raise LocalError(
                f"--volume {text}: no such directory", f"{path} must exist: it is not created", f"mkdir -p {path}"
            )
        volumes[claim] = path
    return volumes


def remarks(file: JobFile, admitted: AdmittedJob, paths: HostPaths) -> Iterator[tuple[str, bool]]:
    """Yield lines to print before the run, and whether each is a warning.

    They say which documents are ignored, what may be a mistake, what differs from a cluster, and which directories
    serve as claims that the job did not create.
    """
    if file.ignored:
        yield f"ignored {len(file.ignored)} other documents: {', '.join(file.ignored)}", False
    wanted, found = admitted.job.spec.devices_per_node, len(visible_gpus())
    if wanted > found:
        machine = f"each node requests {wanted} GPUs, this machine has {found or 'none'}"
        yield f"{machine}: --nproc N sets the number of processes per node", True
    yield from ((mistake.message, True) for mistake in mistakes(admitted.job))
    yield (
        "local mode: images, resource limits, security contexts, probes, placement and network policies are not "
        "enforced, and mount paths are translated into directories of this machine",
        False,
    )
    if not admitted.command:
        yield f"the job has no command: running `{ENTRYPOINT}`, the entrypoint of this project's image", False
    for claim in admitted.claims:
        if claim != admitted.own_claim and claim not in paths.volumes:
            yield f"claim {claim} is {paths.claim(claim)}; use another directory with --volume {claim}=DIR", False


def assign(job: Json, assignment: str) -> None:
    """Carry out one ``--set FIELD=VALUE``: a path below spec, and a YAML value. ``null`` removes the field.

    Raises:
        LocalError: there is no such field or entry, or the value is missing or not YAML.
    """
    path, equals, text = assignment.partition("=")
    try:
        if not equals:
            raise LocalError("the = is missing", "it takes FIELD=VALUE")
        parts = _parts(path.strip())
        _put(job, parts, _value(text, _schema_of(parts)))
        require_known_fields(job)
    except DDPJobError as error:
        raise LocalError(f"--set {assignment}: {error.error}", error.hint, error.next_step or _EXAMPLES) from error


def _parts(path: str) -> list[Part]:
    parts: list[Part] = []
    position = 0
    while position < len(path):
        found = _PART.match(path, position)
        if found is None:
            raise LocalError(f'"{path[position:]}" is not part of a path', "dots separate fields")
        name, index, double, single = found.groups()
        parts.append(int(index) if index is not None else name or double or single)
        position = found.end()
    if not parts or isinstance(parts[0], int):
        raise LocalError("it names no field", "it takes FIELD=VALUE")
    return parts if parts[0] in _ROOTS and len(parts) > 1 else ["spec", *parts]


def _schema_of(parts: list[Part]) -> Json:
    """Return the schema of the value at a path, {} if it allows anything or there is no such field."""
    node = schema()
    for part in parts:
        node = (node.get("items") if isinstance(part, int) else child(node, part)) or {}
    return node


def _value(text: str, node: Json) -> Any:
    """Return the YAML value; a number is text if the field takes text, so that ``--set args[2]=5`` needs no quotes."""
    try:
        value = yaml.load(text, Loader)  # noqa: S506 - derived from SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LocalError(
            f"the value is not YAML: {yaml_problem(error)}",
            "quotes, brackets and braces are YAML syntax",
            "quote the value for the shell and for YAML: --set 'field=\"value\"'",
        ) from error
    if node.get("type") == "string" and isinstance(value, int | float):
        return text.strip()
    if isinstance(value, list) and node.get("items", {}).get("type") == "string":
        return [str(item) if type(item) is int else item for item in value]
    return value


def _put(job: Json, parts: list[Part], value: Any) -> None:
    """Set the value at a path. Missing objects on the way are added, and the entry after the last of a list."""
    holder: Any = job
    path = ""
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, int):
            _require_entry(holder, part, path)
        elif not isinstance(holder, dict):
            raise LocalError(f"{path} is not a mapping here", "it has no fields")
        path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}".lstrip(".")
        if after is not None:
            if (holder.get(part) if isinstance(holder, dict) else holder[part]) is None:
                holder[part] = [] if isinstance(after, int) else {}
            holder = holder[part]
    holder[part] = value
    if value is None:
        del holder[part]


def _require_entry(entries: Any, index: int, path: str) -> None:
    if not isinstance(entries, list):
        raise LocalError(f"{path} is not a list", "[n] selects a list's entry")
    length, field = len(entries), path.removeprefix("spec.")
    if index > length:
        raise LocalError(
            f"{field} has no entry [{index}]",
            f"it has {length}, counted from 0" if length else "it has none",
            f"--set '{field}[{length}]=…' adds one" if length else f"--set '{field}=[a, b]' sets the whole list",
        )
    if index == length:
        entries.append(None)
