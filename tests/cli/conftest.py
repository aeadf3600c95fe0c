"""A command line with a state folder of its own for every test."""

from pathlib import Path

import pytest

from tests.cli.program import Program


@pytest.fixture
def ddpjob(tmp_path: Path) -> Program:
    return Program(tmp_path)
