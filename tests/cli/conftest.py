"""A command line with its own state folder for every test."""

from pathlib import Path

import pytest

from tests.cli.program import Program


@pytest.fixture
def ddpjob(tmp_path: Path) -> Program:
    return Program(tmp_path)
