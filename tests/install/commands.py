"""Generate docs/commands.md from the options and help texts of ``ddpjob``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from ddpjob.cli.main import application

HEAD = """\
# Options of all commands

<!-- Generated from operator/ddpjob/cli by `make generate`; do not edit. -->

The texts are those of `ddpjob COMMAND --help`. [cli.md](cli.md) describes the commands that work on files, and
[local.md](local.md) those that run jobs and look at them.
"""


def reference() -> str:
    """Return the whole page."""
    group: Any = get_command(application())
    context = group.make_context("ddpjob", [], resilient_parsing=True)
    parts = [HEAD]
    for name, command in group.commands.items():
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join(command.get_usage(own).removeprefix("Usage: ").split())
        parts += [f"## {name}\n", f"```text\n{usage}\n```\n", *_texts(command.help), _table(command, own)]
    return "\n".join(parts).rstrip() + "\n"


def _texts(text: str) -> Iterator[str]:
    """Yield the paragraphs; those that Typer must not wrap are literal."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith("\b"):
            yield " ".join(paragraph.split()) + "\n"
            continue
        title, *lines = paragraph.removeprefix("\b\n").splitlines()
        language = "bash" if title.startswith("Example") else "text"
        yield f"{title}\n\n```{language}\n" + "\n".join(line.removeprefix("  ") for line in lines) + "\n```\n"


def _table(command: Any, context: Any) -> str:
    rows = ["| Argument or option | Meaning |", "|---|---|"]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        name = record[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
        rows.append(f"| {_code(name)} | {_cell(record[1])} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
