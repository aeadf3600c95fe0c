"""Reads the one DDPJob to run: from a YAML file, from standard input, or built for a script.

Holds the YAML reader and writer, and the schema of the fields that a user may write.
"""

import json
import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddpjob.api import limits, names
from ddpjob.api.crd import Dumper, openapi
from ddpjob.api.objects import SET_BY_SERVER, Json
from ddpjob.errors import DDPJobError, InvalidJobError, did_you_mean

_REFERENCED = ("Secret", "ConfigMap")  # kinds that the job's pods may refer to
SCRIPT_IMAGE = "local/script"  # a DDPJob needs an image; local mode does not use it

_STRING = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _STRING}
_METADATA = {"name": _STRING, "namespace": _STRING, "labels": _TEXTS, "annotations": _TEXTS}
# The other metadata fields that Kubernetes allows; local mode does not use them.
_OTHER_METADATA = ("finalizers", "generateName", "ownerReferences")
_OPEN = "x-kubernetes-preserve-unknown-fields"


@dataclass
class JobFile:
    """What to run.

    directory: where containers without a workingDir run.
    others: Secrets and ConfigMaps of the same file. ignored: the other documents, as ``Kind name``.
    """

    job: Json
    directory: Path
    others: list[Json] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def read(source: str, script_args: Sequence[str] = ()) -> JobFile:
    """Return the job of ``FILE``, of ``-`` (standard input) or for ``SCRIPT.py``.

    Raises:
        InvalidJobError: there is no such file, it is not YAML, or it does not hold exactly one DDPJob.
    """
    label = "standard input" if source == "-" else source
    try:
        if source.endswith(".py"):
            return _for_script(_existing(source), script_args)
        if script_args:
            raise InvalidJobError(
                f"a job takes no arguments, but {script_args[0]} is given",
                "only a SCRIPT.py takes arguments; the arguments of a job are spec.args",
                "--set 'args=[train, --epochs, \"3\"]' sets them",
            )
        if source == "-":
            return from_text(sys.stdin.read(), Path.cwd())
        path = _existing(source)
        return from_text(path.read_text(encoding="utf-8"), path.parent)
    except DDPJobError as error:
        raise InvalidJobError(f"{label}: {error.error}", error.hint, error.next_step) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise InvalidJobError(
            f"{label} cannot be read: {reason}", "a job is a YAML file", "check its path and mode"
        ) from error


def _existing(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    if path.is_file():
        return path
    if path.is_dir():
        raise InvalidJobError("this is a directory", "a job is a file", f"ls {source}")
    try:
        neighbours = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
        hint = did_you_mean(path.name, neighbours, f"{path.parent} has no such file")
    except OSError:
        hint = f"there is no directory {path.parent}"
    raise InvalidJobError("no such file", hint, "ddpjob run FILE, ddpjob run SCRIPT.py, or - for standard input")


def from_text(text: str, directory: Path) -> JobFile:
    """Return the one job of a YAML text. Raises ``InvalidJobError``."""
    jobs, others, ignored = [], [], []
    for document in _documents(text):
        kind = document.get("kind")
        if kind == names.DDPJOBS.kind:
            jobs.append(document)
        elif kind in _REFERENCED:
            others.append(document)
        else:
            ignored.append(f"{kind or 'a document without kind'} {(document.get('metadata') or {}).get('name', '')}")
    if len(jobs) != 1:
        job_names = [str((job.get("metadata") or {}).get("name", "a DDPJob without a name")) for job in jobs]
        raise InvalidJobError(
            f"it must hold exactly one DDPJob, and it holds {len(jobs)}",
            f"it contains {', '.join(job_names or ignored) or 'nothing'}",
            "put each job into its own file" if jobs else "manifests/examples holds example jobs",
        )
    return JobFile(_as_written(jobs[0]), directory, others, [" ".join(entry.split()) for entry in ignored])


def _documents(text: str) -> list[Json]:
    try:
        loaded = [document for document in yaml.load_all(text, Loader) if document is not None]
        json.dumps(loaded, default=str, skipkeys=True)  # fails for an anchor that contains itself
    except (RecursionError, ValueError) as error:
        raise InvalidJobError(
            f"a value cannot be read: {error}",
            "an anchor (&) must not contain its own alias (*), and numbers and nesting are limited",
            "write the value in full, text in quotes",
        ) from error
    except yaml.YAMLError as error:
        hint = "indentation, quotes and tabs are frequent causes"
        raise InvalidJobError(f"not valid YAML: {yaml_problem(error)}", hint, "correct that line") from error
    found: list[Json] = []
    for document in loaded:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        found += [_object(item) for item in (items if isinstance(items, list) else [document])]
    return found


def _object(document: Any) -> Json:
    """Return the document if it is a Kubernetes object. Raises ``InvalidJobError``."""
    if not isinstance(document, dict):
        raise InvalidJobError(
            f"it contains a {type(document).__name__} where an object is expected",
            "every document begins with apiVersion and kind",
            "manifests/examples holds example jobs",
        )
    if not isinstance(document.get("metadata") or {}, dict):
        raise InvalidJobError(
            f"metadata of {document.get('kind') or 'a document without kind'} is not a mapping",
            "it must contain at least a name",
            "metadata: {name: my-name}",
        )
    return document


def _as_written(job: Json) -> Json:
    """Return the job without what a server sets. Raises ``InvalidJobError`` for an unknown field or version."""
    version, known = job.get("apiVersion"), names.API_VERSION
    if version != known:
        raise InvalidJobError(
            f"this ddpjob does not know apiVersion {version} of DDPJob", f"it knows {known}", f"apiVersion: {known}"
        )
    metadata = job.get("metadata")
    for name, value in (("metadata", metadata), ("spec", job.get("spec"))):
        if not isinstance(value, dict):
            raise InvalidJobError(f"{name} is missing", "a DDPJob has metadata and spec", f"add {name}:")
    job = {key: value for key, value in job.items() if key != "status"}
    job["metadata"] = {key: value for key, value in (metadata or {}).items() if key not in SET_BY_SERVER}
    require_known_fields(job)
    return job


def _for_script(path: Path, script_args: Sequence[str]) -> JobFile:
    job = {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "metadata": {"name": job_name(path.stem)},
        "spec": {"image": SCRIPT_IMAGE, "command": ["torchrun", str(path), *script_args]},
    }
    return JobFile(job, Path.cwd())


def job_name(stem: str) -> str:
    """Return a DDPJob's name for a file name: ``Train_MNIST`` becomes ``train-mnist``."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}" if name else "job"
    return name[: limits.MAX_JOB_NAME].rstrip("-")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, reading as Kubernetes does: no dates, text keys, and no duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - declared like this in PyYAML
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse duplicate keys: YAML would silently drop one of the values."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f'duplicate key "{key}"', problem_mark=key_node.start_mark)
            seen.add(key)
        mapping = super().construct_mapping(node, deep)
        return {_key(key): value for key, value in mapping.items()}


def dump_yaml(*objects: Any) -> str:
    """Return the documents as one YAML stream; everything that is not ASCII is escaped."""
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120)


def yaml_problem(error: Exception) -> str:
    """Return position and cause of a YAML error in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + (error.problem or error.context or "")


def _key(key: Hashable) -> Hashable:
    return str(key).lower() if isinstance(key, bool) else str(key) if isinstance(key, int | float) else key


@cache
def schema() -> Json:
    """Return the schema of a DDPJob as a user may write it."""
    whole = openapi()
    known: Json = _METADATA | {name: {_OPEN: True} for name in _OTHER_METADATA}
    whole["properties"]["metadata"] = {"type": "object", "properties": known}
    return whole


def child(node: Json, name: str) -> Json | None:
    """Return the schema of a field, {} if it allows anything, None if there is no such field."""
    if name in node.get("properties", {}):
        found: Json = node["properties"][name]
        return found
    if "additionalProperties" in node:
        extra: Json = node["additionalProperties"]
        return extra
    is_open = not node or node.get(_OPEN) or ("properties" not in node and node.get("type", "object") == "object")
    return {} if is_open else None


def require_known_fields(job: Json) -> None:
    """Raise ``InvalidJobError`` for the first unknown field: an API server would drop it without an error."""
    _require_known(job, schema(), "")


def _require_known(value: Any, node: Json, path: str) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            below = child(node, name)
            if below is None:
                raise _no_such_field(path, name, list(node.get("properties", {})))
            _require_known(inner, below, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_known(inner, node.get("items", {}), f"{path}[{index}]")


def _no_such_field(parent: str, name: str, known: Sequence[str]) -> InvalidJobError:
    next_step = "docs/fields.md lists every field; options of the trainer belong into args"
    if not known:
        return InvalidJobError(f'{parent} has no fields, so no "{name}"', "it is a single value or a list", next_step)
    hint = did_you_mean(name, known, f"it has {', '.join(known)}")
    return InvalidJobError(f'{parent or "a DDPJob"} has no field "{name}"', hint, next_step)
