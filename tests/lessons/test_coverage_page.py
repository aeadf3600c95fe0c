"""Every row of docs/develop/coverage.md names modules, a command and tests that exist."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ddptrain.cli import _parser
from ddptrain.lesson import lesson_names
from tests.ddptrain.mutants import LESSONS
from tests.install.chart import ROOT
from tests.install.guide import GUIDE

PAGE = (ROOT / "docs" / "develop" / "coverage.md").read_text(encoding="utf-8")
FOLDERS = (*(ROOT / "trainer_app" / name for name in ("", "ddprun", "ddptrain")), ROOT)  # of the modules
CORRECTIONS = (ROOT / "docs" / "concepts" / "torch-distributed" / "corrections.md").read_text(encoding="utf-8")
PARAMETERS = {*lesson_names(), *LESSONS, *(page.stem for page in GUIDE.glob("*.md"))}  # of the tests that are named
ROWS = {  # a row that is removed is noticed
    "Launch and initialization": 29,
    "Messages": 16,
    "Data parallel": 30,
    "Model parallel": 6,
}


def rows(section: str) -> list[list[str]]:
    """Return the cells of each row of a section."""
    _, _, rest = PAGE.partition(f"\n## {section}\n")
    table = rest.partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| Subject |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


SECTIONS = list(ROWS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_names_a_module_a_command_and_a_test(section: str) -> None:
    assert len(rows(section)) == ROWS[section]
    for row in rows(section):
        subject, modules, command, tests, correction = row
        assert subject and tests
        for module in quoted(modules):
            assert any((folder / module).exists() for folder in FOLDERS), row
        assert check_command(*quoted(command)), row
        assert [test for test in quoted(tests) if not exists(test)] == [], row
        assert not correction.replace("|", "").strip() or "corrections.md#" in correction


def quoted(cell: str) -> list[str]:
    """Return what stands between backticks in a cell, of which there is at least one."""
    found = re.findall(r"`([^`]+)`", cell)
    assert found, f"a cell is empty: {cell!r}"
    return found


def check_command(*commands: str) -> bool:
    """Parse each command as its program would; it is not run."""
    for command in commands:
        program, *words = shlex.split(command)
        if program == "ddptrain":
            _parser().parse_args(words)
        elif program == "torchrun":
            get_args_parser().parse_args(words)
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        else:
            assert program in ("ddpjob", "kubectl") and all((ROOT / w).exists() for w in words if w.endswith(".yaml"))
    return True


def exists(test: str) -> bool:
    """Return whether pytest, or `make soak`, would find a test of this name, relative to ``tests``."""
    path, _, name = test.partition("::")
    function, _, parameter = name.rstrip("]").partition("[")
    runs = Path(path).name.startswith("test_") or f"tests/{path}" in (ROOT / "Makefile").read_text()
    return runs and function in functions(path) and (not parameter or parameter in PARAMETERS)


@cache
def functions(path: str) -> set[str]:
    """Return the names of the functions in a file below ``tests``."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_correction_has_a_row() -> None:
    headings = re.findall(r"^### (.*)$", CORRECTIONS, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"corrections\.md#([\w-]+)", PAGE))
    assert linked == anchors


def test_every_test_that_the_corrections_name_exists() -> None:
    named = re.findall(r"`tests/(\w[\w/]*\.py::\w+)`", CORRECTIONS)
    assert named and [test for test in named if not exists(test)] == []
