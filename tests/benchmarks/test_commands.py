"""Programs that no other test starts print their help or can be imported; else an error shows when someone measures."""

from __future__ import annotations

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for path in Path(__file__).parent.glob("[!t]*.py") if "__main__" in path.read_text())
COMMANDS = sorted(set(re.findall(r"-m (tests\.[\w.]+)", (ROOT / "Makefile").read_text())))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_benchmark_prints_its_help(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert not ended.value.code


@pytest.mark.parametrize("module", COMMANDS)
def test_command_of_the_makefile_can_be_imported(module: str) -> None:
    import_module(module)
