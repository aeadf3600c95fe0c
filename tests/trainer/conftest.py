"""One fork server for the whole session; each test's processes are killed when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.builders import SMALL, verb
from tests.trainer.runs import ForkServer, Trained, Whole, fork_server
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


@pytest.fixture(scope="session")
def whole(_server: ForkServer, idx: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that trains without an interruption, once in a session for the same arguments.

    They are the number of ranks, and flags in addition to SMALL. No test may change the directory.
    """
    trained: dict[tuple[object, ...], Trained] = {}
    lock = threading.Lock()

    def train(world_size: int, *flags: object) -> Trained:
        with lock:
            if (world_size, *flags) not in trained:
                folder = tmp_path_factory.mktemp("whole")
                argv = (*verb(world_size), *SMALL, *flags, "--data-dir", idx, "--checkpoint-dir", folder)
                trained[world_size, *flags] = Trained(folder, _server.run(*argv).message())
            return trained[world_size, *flags]

    return train
