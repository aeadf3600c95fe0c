"""Every row of docs/coverage.md names modules, a command and tests that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
from torch.distributed.run import get_args_parser

from ddptrain.cli import _parser
from tests.install.chart import ROOT

PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
CORRECTIONS = (ROOT / "docs" / "torch-distributed" / "corrections.md").read_text(encoding="utf-8")
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
            assert any((folder / module).exists() for folder in (ROOT / "trainer_app" / "ddptrain", ROOT)), row
        assert check_command(*quoted(command)), row
        assert set(quoted(tests)) <= collected(), f"{row}: not collected: {set(quoted(tests)) - collected()}"
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


@cache
def collected() -> set[str]:
    """Return the names of all tests in the files that the page names, as pytest collects them."""
    files = sorted({f"tests/{test.partition('::')[0]}" for test in re.findall(r"`(\w[\w/]*\.py::[^`]+)`", PAGE)})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}
    return names | {name.partition("[")[0] for name in names}


def test_every_correction_has_a_row() -> None:
    headings = re.findall(r"^### (.*)$", CORRECTIONS, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"corrections\.md#([\w-]+)", PAGE))
    assert linked == anchors


def test_every_test_that_the_corrections_name_is_collected() -> None:
    named = set(re.findall(r"`tests/(\w[\w/]*\.py::\w+)`", CORRECTIONS))
    files = sorted({name.partition("::")[0] for name in named})
    for file in files:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        for name in (name for name in named if name.startswith(file)):
            assert re.search(rf"^def {name.partition('::')[2]}\(", source, re.MULTILINE), name
