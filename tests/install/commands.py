"""Fill the parts of docs/reference/commands.md that follow from the options and help texts of ``ddpjob``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from typer.main import get_command

from ddpjob.cli.main import application

_PART = re.compile(r"^<!-- generated: ([a-z ]+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
_SCHEMA = re.compile(r"(?:The|Each line of the) JSON[^.]* schema docs/reference/schemas/\w+\.json[^.]*\.")
_RANGE = re.compile(r" \[(?:required|x>=\d)\]$|; x>=\d(?=\]$)")
_SHARED = "options of several commands"
Row = tuple[str, str]


def with_commands(page: str) -> str:
    """Return the page with every generated part as it has to be."""
    return _PART.sub(lambda found: f"<!-- generated: {found[1]} -->\n\n{_part(found[1])}\n<!-- end -->", page)


def parts_of(page: str) -> list[str]:
    """Return the names of the generated parts: each command, and the options that several commands have."""
    return [found[1] for found in _PART.finditer(page)]


def names() -> list[str]:
    """Return what the page must have a part for."""
    return [_SHARED, *_rows()]


def _part(name: str) -> str:
    if name == _SHARED:
        others = [row for row in _shared() if row not in _common()]
        return f"Of most commands, those about jobs:\n\n{_list(_common())}\nOf several:\n\n{_list(others)}"
    command, context = _command(name)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    texts = [f"`{usage}`\n", *_texts(command.help)]
    own = [row for row in _rows()[name] if row not in _shared()]
    if own:
        texts.append(_list(own))
    shared = [row[0].split(" ")[0].strip("`,") for row in _rows()[name] if row in _shared() and row not in _common()]
    if shared:
        texts.append(f"[Also](#options-of-several-commands) {', '.join(f'`{option}`' for option in shared)}.\n")
    return "\n".join(texts)


def _texts(text: str) -> Iterator[str]:
    """Yield the paragraphs; those that Typer must not wrap are literal. The page has its own examples and schemas."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("\b"):
            if kept := _SCHEMA.sub("", " ".join(paragraph.split())).strip():
                yield f"{kept}\n"
            continue
        title, *lines = paragraph.removeprefix("\b\n").splitlines()
        if not title.startswith("Example"):
            yield f"{title}\n\n```text\n" + "\n".join(line.removeprefix("  ") for line in lines) + "\n```\n"


def _list(rows: list[Row]) -> str:
    return "\n".join(f"- {name}: {meaning}" for name, meaning in rows) + "\n"


def _command(name: str) -> tuple[Any, Any]:
    group: Any = get_command(application())
    command = group.commands[name]
    return command, command.make_context(name, [], group.make_context("ddpjob", [name]), resilient_parsing=True)


@cache
def _rows() -> dict[str, list[Row]]:
    """Return name and meaning of each argument and option by command, without the name of a job."""
    group: Any = get_command(application())
    return {name: list(_rows_of(name)) for name in group.commands}


def _rows_of(name: str) -> Iterator[Row]:
    command, context = _command(name)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        shown = record and (record[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name)
        if shown is None or "--help" in parameter.opts or shown.strip("[]") == "NAME":
            continue
        yield f"`{_line(shown)}`", _RANGE.sub("", _line(record[1]))


@cache
def _shared() -> list[Row]:
    """Return the rows that several commands have; of an option with several meanings, the most frequent one."""
    uses = Counter(row for rows in _rows().values() for row in rows)
    most = {row[0]: row for row, _ in reversed(uses.most_common())}
    return [row for row, count in uses.items() if count > 1 and most[row[0]] == row]


@cache
def _common() -> list[Row]:
    """Return the rows that most commands have."""
    every = [row for rows in _rows().values() for row in rows]
    return [row for row in _shared() if every.count(row) > len(_rows()) / 2]


def _line(text: str) -> str:
    return " ".join(text.split())
