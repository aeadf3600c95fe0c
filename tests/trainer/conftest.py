"""One fork server for the whole session; each test's processes are killed when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.runs import ForkServer, fork_server
from tests.trainer.synthetic import write_idx


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server(tmp_path_factory.mktemp("runs")) as server:
        yield server


@pytest.fixture
def ddptrain(_server: ForkServer) -> Iterator[ForkServer]:
    """Return the fork server, which starts ``ddptrain`` processes."""
    yield _server
    _server.clean()


@pytest.fixture(scope="session")
def idx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a synthetic data set of 300 training and 70 test samples."""
    return write_idx(tmp_path_factory.mktemp("idx"))
