"""The debugger's configurations start programs that exist, with arguments that these accept."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from ddptrain.cli import _parser, resolve_flags

ROOT = Path(__file__).parents[2]
CONFIGURATIONS: list[dict[str, Any]] = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
STARTED = [each for each in CONFIGURATIONS if each["request"] == "launch"]


def check_ddptrain(arguments: list[str]) -> None:
    """Parse the arguments, and check that a breakpoint has no time limit."""
    parsed = _parser().parse_args(arguments)
    assert resolve_flags(parsed).hang_timeout == 0
    assert resolve_flags(parsed).collective_timeout > 3600


@pytest.mark.parametrize("configuration", STARTED, ids=lambda configuration: configuration["name"])
def test_debugger_starts_a_program_with_arguments_that_it_accepts(configuration: dict[str, Any]) -> None:
    assert configuration["type"] == "debugpy"
    assert configuration["cwd"] == "${workspaceFolder}"
    assert configuration["python"] == "${workspaceFolder}/.venv/bin/python"  # `make setup` creates it
    assert find_spec(configuration["module"])
    if configuration["module"] == "ddptrain":
        check_ddptrain(configuration["args"])
        return
    assert configuration["subProcess"], "the ranks are child processes of torchrun"
    flags = get_args_parser().parse_args(configuration["args"])
    assert find_spec(flags.training_script) if flags.module else (ROOT / flags.training_script).is_file()
    if flags.training_script == "ddptrain":
        check_ddptrain(flags.training_script_args)
