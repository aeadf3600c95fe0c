"""From a file, standard input or a script to the one DDPJob that is to run."""

import json
import re
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.cli.text import did_you_mean
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
# The server's to set: they stand in what `ddpjob get -o yaml` and `kubectl get -o yaml` print.
_SERVERS = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "managedFields")
_REFERRED = ("Secret", "ConfigMap")  # what pods of a job may refer to
SCRIPT_IMAGE = "local/script"  # a DDPJob needs an image; nothing on one machine reads it


@dataclass
class JobFile:
    """What is to run.

    others: Secrets and ConfigMaps beside the job. ignored: the other documents, as ``Kind name``.
    directory: where containers without a workingDir run.
    """

    job: Json
    directory: Path
    others: list[Json] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


def read(source: str, script_args: Sequence[str] = ()) -> JobFile:
    """The job of ``FILE``, of ``-`` (standard input) or for ``SCRIPT.py``.

    Raises:
        LocalError: it is not there, not YAML, or not exactly one DDPJob.
    """
    if source.endswith(".py"):
        return _for_script(_existing(source), script_args)
    if script_args:
        raise LocalError(
            f"{source} takes no arguments, but there is {script_args[0]}",
            "only a SCRIPT.py does; a job's own arguments are spec.args",
            "--set 'args=[train, --epochs, \"3\"]' sets them",
        )
    if source == "-":
        return _from_text(sys.stdin.read(), "standard input", Path.cwd())
    path = _existing(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise LocalError(
            f"{source} cannot be read: {reason}", "a job is a YAML file", "check its path and mode"
        ) from error
    return _from_text(text, source, path.parent)


def _existing(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    if path.is_file():
        return path
    if path.is_dir():
        raise LocalError(f"{source} is a directory", "a job is one file", f"ls {source}")
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
        hint = did_you_mean(path.name, beside, f"{path.parent} has no such file")
    except OSError:
        hint = f"there is no directory {path.parent}"
    raise LocalError(f"{source}: no such file", hint, "ddpjob run FILE, ddpjob run SCRIPT.py, or - for standard input")


def _from_text(text: str, source: str, directory: Path) -> JobFile:
    jobs, others, ignored = [], [], []
    for document in _documents(text, source):
        kind = document.get("kind")
        if kind == names.DDPJOBS.kind:
            jobs.append(document)
        elif kind in _REFERRED:
            others.append(document)
        else:
            ignored.append(f"{kind or 'a document without kind'} {(document.get('metadata') or {}).get('name', '')}")
    if len(jobs) != 1:
        found = ", ".join(_name(job) for job in jobs) if jobs else ", ".join(ignored) or "nothing"
        raise LocalError(
            f"{source} must hold exactly one DDPJob, not {len(jobs)}",
            f"it holds {found}",
            "put each job into a file of its own" if jobs else "manifests/examples has jobs to start from",
        )
    return JobFile(_as_written(jobs[0], source), directory, others, [" ".join(entry.split()) for entry in ignored])


def _documents(text: str, source: str) -> list[Json]:
    try:
        loaded = [document for document in yaml.load_all(text, Loader) if document is not None]
        json.dumps(loaded, default=str, skipkeys=True)  # an anchor may lead back to itself, which no tree can hold
    except (RecursionError, ValueError) as error:
        raise LocalError(
            f"{source} holds a value that cannot be read: {error}",
            "an anchor (&) must not contain its own alias (*), and numbers and nesting have a limit",
            "write the value out, text in quotes",
        ) from error
    except yaml.YAMLError as error:
        raise LocalError(
            f"{source} is not valid YAML: {problem(error)}",
            "mind indentation, quotes and tabs",
            "correct that line",
        ) from error
    found: list[Json] = []
    for document in loaded:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        found += [_object(item, source) for item in (items if isinstance(items, list) else [document])]
    return found


def _object(document: Any, source: str) -> Json:
    """Raises ``LocalError`` for what is no object of Kubernetes."""
    if not isinstance(document, dict):
        raise LocalError(
            f"{source} holds a {type(document).__name__} where an object should be",
            "every document begins with apiVersion and kind",
            "manifests/examples has jobs to start from",
        )
    if not isinstance(document.get("metadata") or {}, dict):
        raise LocalError(
            f"{source}: metadata of {document.get('kind') or 'a document without kind'} is no mapping",
            "it holds at least a name",
            "metadata: {name: my-name}",
        )
    return document


def _as_written(job: Json, source: str) -> Json:
    """The job as its user wrote it: without what a server added, and with nothing that a DDPJob does not have."""
    version = job.get("apiVersion")
    if version != names.API_VERSION:
        raise LocalError(
            f"{source}: apiVersion {version} of DDPJob is not known here",
            f"this ddpjob knows {names.API_VERSION}",
            f"write apiVersion: {names.API_VERSION}",
        )
    metadata = job.get("metadata")
    for name, value in (("metadata", metadata), ("spec", job.get("spec"))):
        if not isinstance(value, dict):
            raise LocalError(f"{source}: {name} is missing", "a DDPJob has metadata and spec", f"add {name}:")
    job = {key: value for key, value in job.items() if key != "status"}
    job["metadata"] = {key: value for key, value in (metadata or {}).items() if key not in _SERVERS}
    check(job, source)
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
    """A file's name as the name of a DDPJob: ``Train_MNIST`` becomes ``train-mnist``."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}" if name else "job"
    return name[: names.MAX_JOB_NAME].rstrip("-")


def _name(job: Json) -> str:
    return str((job.get("metadata") or {}).get("name", "one without a name"))


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader without what Kubernetes' own reader does otherwise."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - so it is declared there
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice: one of the two would be lost without a word."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f'"{key}" stands twice', problem_mark=key_node.start_mark)
            seen.add(key)
        mapping = super().construct_mapping(node, deep)
        return {_key(key): value for key, value in mapping.items()}


class Dumper(yaml.SafeDumper):
    """Writes repeated parts out in full: not every reader of a manifest understands YAML's anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(*objects: Any) -> str:
    """Documents of one stream, escapes for whatever is not ASCII included."""
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120)


def problem(error: yaml.YAMLError) -> str:
    """What is wrong, and where, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + (error.problem or error.context or "")


def _key(key: Hashable) -> Hashable:
    return str(key).lower() if isinstance(key, bool) else str(key) if isinstance(key, int | float) else key


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
