"""Reads the one DDPJob to run: from a YAML file, from standard input, or built for a script.

Holds the YAML reader and writer, and the schema of the fields that a user may write.
"""

import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ddpjob.api import limits, names
from ddpjob.api.model import without_descriptions
from ddpjob.api.objects import SET_BY_SERVER, Json
from ddpjob.api.spec import Location, field_path
from ddpjob.client.crd import Dumper, openapi
from ddpjob.convert import KINDS
from ddpjob.errors import DDPJobError, InvalidJobError, did_you_mean

_REFERENCED = ("Secret", "ConfigMap")  # kinds that the job's pods may refer to
SCRIPT_IMAGE = "local/script"  # a DDPJob needs an image; local mode does not use it

_STRING = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _STRING}
_METADATA = {"name": _STRING, "namespace": _STRING, "labels": _TEXTS, "annotations": _TEXTS}
# The other metadata fields that Kubernetes allows; local mode does not use them.
_OTHER_METADATA = ("finalizers", "generateName", "ownerReferences")
_OPEN = "x-kubernetes-preserve-unknown-fields"
_MAX_VALUES = 1_000_000  # of one file; a DDPJob may have far fewer, an API server takes 3 MB
_TEXT_OF_A_VALUE = 16  # characters that count as one more value: aliases of 0.5 MB stood for 8 GB of text
_MAX_MERGED = 100_000  # keys that merges (<<) copy
_MAX_BITS = 1024  # of a number; the largest that JSON has in common use is a float64
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_KINDS_OF_VALUES: Mapping[type, str] = {
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}

Mistake = tuple[Location, InvalidJobError]
"""Where a DDPJob is wrong, and how."""


@dataclass
class JobFile:
    """What to run.

    directory: where containers without a workingDir run.
    others: Secrets and ConfigMaps of the same file. ignored: the other documents, as ``Kind name``.
    script: the Python script for which the job was built, as the command has it.
    """

    job: Json
    directory: Path
    others: list[Json] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    script: Path | None = None


def read(source: str, script_args: Sequence[str] = (), launcher: names.ScriptLauncher | None = None) -> JobFile:
    """Return the job of ``FILE``, of ``-`` (standard input) or for ``SCRIPT.py``.

    script_args: of the script; none for a file (``append_args``).
    launcher: of the script, by default ``ddprun``; the command of a file says what starts its processes.

    Raises:
        InvalidJobError: there is no such file, it is not YAML, it does not hold exactly one DDPJob, or a launcher is
            given for a file.
    """
    label = "standard input" if source == "-" else source
    try:
        if source.endswith(".py"):
            return _for_script(_existing(source), script_args, launcher or "ddprun")
        if launcher is not None:
            raise InvalidJobError(
                "a launcher can be chosen for a script only",
                "the command of a job file says what starts its processes",
                "set command and launcher in the file, or with --set launcher=Injected",
            )
        return from_text(read_text(source), Path.cwd() if source == "-" else _existing(source).parent)
    except DDPJobError as error:
        raise InvalidJobError(f"{label}: {error.error}", error.hint, error.next_step) from error


def append_args(job: Json, args: Sequence[str]) -> None:
    """Put arguments after ``spec.args``: of an option that is given twice, most programs take the last."""
    spec = job.get("spec")
    if args and isinstance(spec, dict) and isinstance(known := spec.get("args") or [], list):
        spec["args"] = [*known, *args]  # a spec or args of another type is refused later, with its field


def read_text(source: str) -> str:
    """Return the text of a file, or of standard input for ``-``. Raises ``InvalidJobError``."""
    try:
        return sys.stdin.read() if source == "-" else _existing(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise InvalidJobError(
            f"it cannot be read: {reason}", "a job is a YAML file", "check its path and mode"
        ) from error


def _existing(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        raise InvalidJobError("this is a directory", "a job is a file", f"ls {source}")
    if path.exists():  # also a pipe: ddpjob validate <(helm template …)
        return path
    try:
        neighbours = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
        hint = did_you_mean(path.name, neighbours, f"{path.parent} has no such file")
    except OSError:
        hint = f"there is no directory {path.parent}"
    raise InvalidJobError("no such file", hint, "ddpjob run FILE, ddpjob run SCRIPT.py, or - for standard input")


def from_text(text: str, directory: Path) -> JobFile:
    """Return the one job of a YAML text. Raises ``InvalidJobError``."""
    jobs, others, ignored = [], [], []
    for document in documents_of(text):
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
            "put each job into its own file" if jobs else beginning(ignored),
        )
    return JobFile(_as_written(jobs[0]), directory, others, [" ".join(entry.split()) for entry in ignored])


def beginning(ignored: Sequence[str]) -> str:
    """Return where a DDPJob can come from, for a file with these other objects."""
    if any(entry.startswith(KINDS) for entry in ignored):
        return "ddpjob convert FILE makes a DDPJob of it"
    return "ddpjob init prints a job to begin with"


class YamlObject(NamedTuple):
    """An object of a YAML text with its ``yaml.Node``, or why it cannot be read; and where it begins."""

    found: Json | InvalidJobError
    node: Any
    mark: yaml.Mark | None


def documents_of(text: str) -> list[Json]:
    """Return the objects of a YAML text, with the items of its Lists. Raises ``InvalidJobError``."""
    found: list[Json] = []
    for written in objects_of(text):
        if isinstance(written.found, InvalidJobError):
            raise written.found
        found.append(written.found)
    return found


def objects_of(text: str) -> Iterator[YamlObject]:
    """Yield each object of a YAML text, also those after one that cannot be read, and the items of Lists."""
    try:
        loader = Loader(text)
    except yaml.YAMLError as error:
        yield _unreadable(error)
        return
    try:
        while loader.check_node():
            node: yaml.Node = loader.get_node()  # type: ignore[assignment]
            try:
                document = loader.construct_document(node)
                require_json(document)
            except (RecursionError, ValueError, yaml.YAMLError) as error:
                yield _unreadable(error, node)
                continue
            yield from _items(node, document)
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        yield _unreadable(error)  # nothing behind it can be read
    finally:
        loader.dispose()


def _items(node: yaml.Node, document: Any) -> Iterator[YamlObject]:
    if document is None:
        return
    items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
    for index, item in enumerate(items if isinstance(items, list) else [document]):
        own = node if item is document else node_at(node, ("items", index))[0]
        try:
            yield YamlObject(require_object(item), own, own.start_mark)
        except InvalidJobError as error:
            yield YamlObject(error, own, own.start_mark)


def node_at(root: yaml.Node, location: Location) -> tuple[yaml.Node, yaml.Mark]:
    """Return the node at a location and where it begins, with its key; the nearest around it if there is none."""
    node, mark = root, root.start_mark
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.start_mark
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        # The last one: keys of a merge (<<) come first, and own keys override them.
        found = next(((key, value) for key, value in reversed(pairs) if key.value == str(part)), None)
        if found is None:
            break
        mark, node = found[0].start_mark, found[1]
    return node, mark


def require_json(value: Any) -> None:
    """Raise ``ValueError`` for a value that has no end, or is far too large, because of anchors (&) and aliases (*).

    It takes time for each value as it is written, not for each of its copies.
    """
    sizes: dict[int, int] = {}  # 0: of a value that is being counted

    def size(one: Any) -> int:
        if not isinstance(one, dict | list):
            return 1 + (len(one) // _TEXT_OF_A_VALUE if isinstance(one, str) else 0)
        if (known := sizes.get(id(one))) is not None:
            if known == 0:
                raise ValueError("Circular reference detected")
            return known
        sizes[id(one)] = 0
        count = 1 + sum(map(size, (*one.values(), *one) if isinstance(one, dict) else one))
        if count > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values, or as much text")
        sizes[id(one)] = count
        return count

    size(value)


def _unreadable(error: Exception, node: yaml.Node | None = None) -> YamlObject:
    """Return the error of a YAML text that cannot be read."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    mark = mark or (node.start_mark if node else None)
    if isinstance(error, yaml.YAMLError):
        hint = "indentation, quotes and tabs are frequent causes"
        found = InvalidJobError(f"not valid YAML: {yaml_problem(error)}", hint, "correct that line")
        return YamlObject(found, node, mark)
    found = InvalidJobError(
        f"a value cannot be read: {error}",
        "an anchor (&) must not contain its own alias (*), and numbers and nesting are limited",
        "write the value in full, text in quotes",
    )
    return YamlObject(found, node, mark)


def require_object(document: Any) -> Json:
    """Return the document if it is a Kubernetes object. Raises ``InvalidJobError``."""
    if not isinstance(document, dict):
        raise InvalidJobError(
            f"it contains {_KINDS_OF_VALUES.get(type(document), 'a value')} where an object is expected",
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
    for _, mistake in head_mistakes(job):
        raise mistake
    job = without_server_fields(job)
    require_known_fields(job)
    return job


def head_mistakes(job: Json) -> Iterator[Mistake]:
    """Yield what is wrong with the version of a DDPJob and its two parts."""
    version, known = job.get("apiVersion"), names.API_VERSION
    if version != known:
        yield (
            ("apiVersion",),
            InvalidJobError(
                f"this ddpjob does not know apiVersion {version} of DDPJob", f"it knows {known}", f"apiVersion: {known}"
            ),
        )
    for name in ("metadata", "spec"):
        if not isinstance(job.get(name), dict):
            missing = InvalidJobError(f"{name} is missing", "a DDPJob has metadata and spec", f"add {name}:")
            yield (name,), missing


def without_server_fields(job: Json) -> Json:
    """Return the job without what a server sets: its status and parts of its metadata."""
    metadata = {key: value for key, value in (job.get("metadata") or {}).items() if key not in SET_BY_SERVER}
    return {key: value for key, value in job.items() if key != "status"} | {"metadata": metadata}


def _for_script(path: Path, script_args: Sequence[str], launcher: names.ScriptLauncher) -> JobFile:
    """Return a job that starts a script; with ddprun its image needs Python and torch alone, and no ddprun."""
    spec: Json = {"image": SCRIPT_IMAGE, "command": [launcher, str(path), *script_args]}
    if launcher == "ddprun":
        spec["launcher"] = "Injected"
    metadata = {"name": job_name(path.stem)}
    job = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata, "spec": spec}
    return JobFile(job, Path.cwd(), script=path)


def job_name(stem: str) -> str:
    """Return a DDPJob's name for a file name: ``Train_MNIST`` becomes ``train-mnist``."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}" if name else "job"
    return name[: limits.MAX_JOB_NAME].rstrip("-")


def _not_valid(node: yaml.Node) -> yaml.MarkedYAMLError:
    kind = node.tag.rpartition(":")[2]
    limit = ", or it is too large" if kind == "int" else ""
    return yaml.MarkedYAMLError(problem=f"the value is not a valid {kind}{limit}", problem_mark=node.start_mark)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, reading as Kubernetes does: no dates, no numbers like 1:30 (1 h 30), no duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - declared like this in PyYAML
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        """Read a text. Raises ``yaml.YAMLError`` for characters that YAML does not allow."""
        super().__init__(stream)
        self._flattened: dict[int, yaml.MappingNode] = {}
        self._merged = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raise ``MarkedYAMLError`` for a scalar that its tag (``!!bool``) does not allow, or that is far too large."""
        try:
            if node.tag in _NUMBERS and ":" in node.value:
                raise ValueError
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ValueError
        except (AttributeError, IndexError, KeyError, ValueError) as error:
            if isinstance(node, yaml.ScalarNode):
                raise _not_valid(node) from error
            raise
        return value

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """Return the tag of a value. YAML 1.1 reads 1:30 as a number to base 60, in time quadratic in its length."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return self.DEFAULT_SCALAR_TAG if tag in _NUMBERS and ":" in (value or "") else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping with text keys."""
        mapping = super().construct_mapping(node, deep)
        return {_key(key): value for key, value in mapping.items()}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merges (<<) by their content; each node is replaced once.

        Refuse duplicate keys, of which YAML would silently drop one; afterwards a key may override a merged one.
        """
        if id(node) in self._flattened:
            return
        self._flattened[id(node)] = node
        self._refuse_duplicates(node)
        before = len(node.value)
        super().flatten_mapping(node)
        self._merged += max(0, len(node.value) - before)
        if self._merged > _MAX_MERGED:
            raise ValueError(f"merges (<<) copy more than {_MAX_MERGED:,} keys")

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f'duplicate key "{key}"', problem_mark=key_node.start_mark)
            seen.add(key)


class _BlockDumper(Dumper):
    """Writes text of several lines as it is, below ``|``."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _text)


def dump_yaml(*objects: Any) -> str:
    """Return the documents as one YAML stream; everything that is not ASCII is escaped."""
    return yaml.dump_all(objects, Dumper=_BlockDumper, sort_keys=False, width=120)


def yaml_problem(error: Exception) -> str:
    """Return position and cause of a YAML error in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + (error.problem or error.context or "")


def _key(key: Hashable) -> str:
    if key is None:
        return "null"
    return str(key).lower() if isinstance(key, bool) else str(key)


@cache
def schema() -> Json:
    """Return the schema of a DDPJob as a user may write it."""
    with without_descriptions():
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
    for _, mistake in unknown_fields(job):
        raise mistake


def unknown_fields(job: Json) -> Iterator[Mistake]:
    """Yield the fields of a DDPJob that its schema does not have."""
    return _unknown(job, schema(), ())


def _unknown(value: Any, node: Json, location: Location) -> Iterator[Mistake]:
    if isinstance(value, dict):
        for name, inner in value.items():
            below = child(node, name)
            if below is None:
                path = field_path("", location).removeprefix(".")
                yield (*location, name), _no_such_field(path, name, list(node.get("properties", {})))
            else:
                yield from _unknown(inner, below, (*location, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown(inner, node.get("items", {}), (*location, index))


def _no_such_field(parent: str, name: str, known: Sequence[str]) -> InvalidJobError:
    next_step = "docs/reference/fields.md lists every field; options of the trainer belong into args"
    if not known:
        return InvalidJobError(f'{parent} has no fields, so no "{name}"', "it is a single value or a list", next_step)
    hint = did_you_mean(name, known, f"it has {', '.join(known)}")
    return InvalidJobError(f'{parent or "a DDPJob"} has no field "{name}"', hint, next_step)
