"""Programs that no other test starts can be imported; else an import of what is gone shows when someone measures."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = {f"tests.benchmarks.{path.stem}" for path in Path(__file__).parent.glob("*.py")}
COMMANDS = set(re.findall(r"-m (tests\.[\w.]+)", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("module", sorted(BENCHMARKS | COMMANDS))
def test_a_benchmark_or_command_of_the_makefile_can_be_imported(module: str) -> None:
    import_module(module)
