"""Commands in the documents parse, and the guide names every option."""

import re
import shlex

import pytest
from typer.main import get_command

from ddpjob.cli.main import application
from tests.cli.program import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GUIDE = (ROOT / "docs" / "tasks" / "local.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return every `ddpjob` command of a shell block, without comment and pipe."""
    lines = [
        line.partition(" | ")[0]
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.splitlines()
    ]
    return [line for line in lines if re.match(r"(\.venv/bin/)?ddpjob ", line)]


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_documents_parses(line: str) -> None:
    _, verb, *arguments = shlex.split(line, comments=True)
    group = get_command(application())
    command = group.commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, arguments, parent=group.make_context("ddpjob", [verb]))


def test_the_documents_show_commands() -> None:
    assert len(commands()) >= 6


def test_every_option_of_run_is_in_the_guide() -> None:
    run = get_command(application()).commands["run"]  # type: ignore[attr-defined]
    options = {option for parameter in run.params for option in parameter.opts if option.startswith("--")}
    assert {option for option in options if option not in GUIDE} <= {"--help", "--output"}
