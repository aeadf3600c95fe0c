"""Generate docs/reference/python-reference.md from the signatures and docstrings of the Python API."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ddpjob import Client, DDPJob, errors
from ddpjob.api.model import WireModel, descriptions
from ddpjob.api.spec import DDPJobSpec
from ddpjob.api.status import DDPJobStatus
from ddpjob.api.time_spent import TimeSpent
from tests.install import schemas
from tests.install.fields import cell

HEAD = """\
# Reference of the Python API

<!-- Generated from operator/ddpjob by `make generate`; do not edit. -->

[This page](../tasks/python.md) explains the API with examples. `Client`, `DDPJob`, `LogLine`, `Explanation` and
`DDPJobError` are imported from `ddpjob`, the other errors from `ddpjob.errors`. `result.wire()` returns most results as
JSON, with the names that `ddpjob COMMAND -o json` prints ([schemas](schemas.md)): `nodeRank` for `node_rank`.
"""
_FIELDS_PAGE = {DDPJobSpec: "spec", DDPJobStatus: "status", TimeSpent: "timespent"}
"""Models whose fields docs/reference/fields.md describes, and the heading there."""
_STATUS = (DDPJobStatus, TimeSpent)
_WIDTH = 100


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD, *_class(Client, "client"), *_class(DDPJob, "job")]
    parts += ["## Results\n"]
    for model in results():
        parts += _result(model)
    parts += ["## Status and spec\n"]
    parts.append(
        "`job.status` and `job.spec` have the fields of [fields.md](fields.md) with Python's names: `nodes_ready` for\n"
        "`nodesReady`. What is absent is None.\n"
    )
    for model in _STATUS:
        parts += [f"### {model.__name__}\n", f"Fields: [{model.__name__}](fields.md#{_FIELDS_PAGE[model]}).\n"]
        parts += _members(model, "status" if model is DDPJobStatus else "status.time", "####")
    return "\n".join([*parts, *_errors()]).rstrip() + "\n"


def results() -> list[type]:
    """Return the classes of the package that the methods return, in the order of their use."""
    found: list[type] = []
    queue = [hint for cls in (Client, DDPJob) for _, member in _public(cls) for hint in _hints(member).values()]
    while queue:
        hint = queue.pop(0)
        if not isinstance(hint, type) or typing.get_origin(hint):
            queue += hint if isinstance(hint, list) else typing.get_args(hint)  # a list: parameters of a Callable
            continue
        if not _is_of_package(hint) or hint in found or hint in _FIELDS_PAGE:
            continue
        if issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint):
            found.append(hint)
            queue += typing.get_type_hints(hint).values()
    return found


def _is_of_package(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__module__.startswith("ddpjob.")


def _class(cls: type, variable: str) -> Iterator[str]:
    yield f"## {cls.__name__}\n"
    if cls is not Client:
        yield _signature(cls.__name__, "", cls.__init__, cls)
    yield from _text(cls)
    if cls is not Client:
        yield from _sections(inspect.getdoc(cls.__init__) or "")
    yield from _members(cls, variable, "###")


def _members(cls: type, variable: str, level: str) -> Iterator[str]:
    """Yield the properties as a table, then each method under a heading of its own."""
    public = list(_public(cls))
    properties = [(name, member) for name, member in public if isinstance(member, property | cached_property)]
    if properties:
        meanings = {name: inspect.getdoc(member) or "" for name, member in properties}
        yield from _list({name: _hints(member)["return"] for name, member in properties}, meanings)
    for name, member in public:
        if isinstance(member, property | cached_property):
            continue
        is_static = isinstance(member, staticmethod | classmethod)
        yield f"{level} {name}\n"
        yield _signature(name, f"{cls.__name__ if is_static else variable}.", member, cls)
        yield from _sections(inspect.getdoc(_function(member)) or "")


def _result(cls: type) -> Iterator[str]:
    """Yield the section of a typed result. If its JSON has a schema, the meanings of its fields are there."""
    yield f"### {cls.__name__}\n"
    text, meanings = _described(cls)
    yield _markdown(text) + "\n"
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if _is_field(name, hint)}
    if schema := _schema_of(cls):
        fields = ", ".join(_linked(name, hint) for name, hint in hints.items())
        yield f"Fields, with types and meanings in [{schema.name}](schemas/{schema.name}): {fields}.\n"
    else:
        yield from _list(hints, meanings)
    yield from _members(cls, "result", "####")


def _linked(name: str, hint: Any) -> str:
    """Return the name of a field, with the type if that is another result."""
    return f"`{name}` ({_type(hint)})" if _has_model(hint) else f"`{name}`"


def _is_field(name: str, hint: Any) -> bool:
    return not name.startswith("_") and typing.get_origin(hint) is not typing.ClassVar and name != "model_config"


@cache
def _schemas() -> dict[str, Path]:
    """Return the first schema of docs/reference/schemas that has a model, by the name of the model."""
    found: dict[str, Path] = {}
    for path in sorted(schemas.FOLDER.glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        for name in (schema.get("title", ""), *schema.get("$defs", {})):
            found.setdefault(name, path)
    return found


def _schema_of(cls: type) -> Path | None:
    return _schemas().get(cls.__name__) if issubclass(cls, WireModel) else None


def _list(hints: Mapping[str, Any], meanings: Mapping[str, str]) -> Iterator[str]:
    """Yield a list of fields or properties with type and meaning."""
    yield "\n".join(f"- `{name}` ({_type(hint)}): {_markdown(meanings[name])}" for name, hint in hints.items()) + "\n"


def _described(cls: type) -> tuple[str, Mapping[str, str]]:
    """Return the text of a class, and the text of each field: below it, or as ``field: text`` in the docstring."""
    text = inspect.getdoc(cls) or ""
    if issubclass(cls, WireModel):
        return text, descriptions(cls)
    names = "|".join(typing.get_type_hints(cls))
    first, *found = re.split(rf"(?:(?<=\.)\s+|^)((?:{names})(?:, (?:{names}))*):\s", text, flags=re.MULTILINE)
    meanings = {}
    for listed, meaning in zip(found[::2], found[1::2], strict=True):
        meanings |= {name: _sentence(meaning) for name in listed.split(", ")}
    return first.strip(), meanings


def _text(cls: type) -> Iterator[str]:
    text, meanings = _described(cls)
    yield _markdown(text) + "\n"
    hints = typing.get_type_hints(cls)
    if meanings:
        yield from _list({name: hints[name] for name in meanings}, meanings)


def _errors() -> Iterator[str]:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.DDPJobError)]
    own = ast.parse(inspect.getsource(errors)).body
    order = [node.name for node in own if isinstance(node, ast.ClassDef)]
    yield "## Errors\n\n| Class | Is also | Means |\n|---|---|---|"
    for cls in sorted(found, key=lambda cls: order.index(cls.__name__)):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        yield f"| `{cls.__name__}` | {bases} | {cell(_markdown(inspect.getdoc(cls)))} |"


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines, in the order of its source."""
    for name, member in vars(cls).items():
        is_member = inspect.isfunction(member) or isinstance(
            member, property | cached_property | staticmethod | classmethod
        )
        if is_member and not name.startswith(("_", "model_")) and name != "from_file":
            yield name, member


def _function(member: Any) -> Any:
    """Return the function behind a method or property."""
    for attribute in ("fget", "func", "__func__"):
        member = getattr(member, attribute, None) or member
    return member


def _hints(member: Any) -> dict[str, Any]:
    """Return the types of parameters and result, also of names that are imported for type checkers alone."""
    function = _function(member)
    module = sys.modules[function.__module__]
    known = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddpjob."):
            source = importlib.import_module(str(node.module))
            known |= {alias.asname or alias.name: getattr(source, alias.name) for alias in node.names}
    return typing.get_type_hints(function, localns=vars(module) | known)


def _signature(name: str, prefix: str, member: Any, owner: type) -> str:
    """Return the signature in a block of code, with a line per parameter if it is long."""
    hints = {key: _plain(hint).replace("Self", owner.__name__) for key, hint in _hints(member).items()}
    words: list[str] = []
    for parameter in list(inspect.signature(_function(member)).parameters.values()):
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        words.append(f"{stars}{parameter.name}: {hints[parameter.name]}{default}")
    line = f"{prefix}{name}({', '.join(words)})"
    result = f" -> {hints['return']}" if prefix else ""
    if len(line + result) > _WIDTH:
        line = f"{prefix}{name}(\n" + "".join(f"    {word},\n" for word in words) + ")"
    return f"```text\n{line}{result}\n```\n"


def _value(default: object) -> str:
    return str(getattr(default, "__name__", repr(default)))


def _plain(hint: Any) -> str:
    """Return a type as it is written in Python, without modules."""
    if hint is type(None):
        return "None"
    text = re.sub(r"\bNoneType\b", "None", inspect.formatannotation(hint))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", text)


def _type(hint: Any) -> str:
    """Return a type for a table, with links to the results in it."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    text = cell(_plain(hint))
    names = {model.__name__: f"#{model.__name__.lower()}" for model in results()} if _has_model(hint) else {}
    names |= {model.__name__: f"fields.md#{heading}" for model, heading in _FIELDS_PAGE.items()}
    for name, target in names.items():
        text = re.sub(rf"(?<!\w){name}(?!\w)", f"[{name}]({target})", text)
    return text if "[" in text and "](" in text else f"`{text}`"


def _has_model(hint: Any) -> bool:
    return _is_of_package(hint) or any(_has_model(part) for part in typing.get_args(hint))


def _sections(text: str) -> Iterator[str]:
    """Yield a docstring with the sections Args and Raises as lists."""
    for part in re.split(r"\n\n", text):
        title, _, body = part.partition(":\n")
        if title not in ("Args", "Raises"):
            yield _markdown(part) + "\n"
            continue
        yield f"{'Arguments' if title == 'Args' else 'Errors'}:\n"
        yield "\n".join(f"- `{name}`: {_markdown(meaning)}" for name, meaning in _entries(body.splitlines())) + "\n"


def _entries(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry; lines that are indented further continue it."""
    name, text = "", ""
    for line in lines:
        if line.startswith("        "):
            text += " " + line.strip()
            continue
        if name:
            yield name, text
        name, _, text = line.strip().partition(": ")
    yield name, text


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _markdown(text: str | None) -> str:
    """Return a docstring's text as Markdown."""
    parts = (text or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)
