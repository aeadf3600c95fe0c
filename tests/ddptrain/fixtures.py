"""One fork server for the whole session; each test's processes are killed when it ends.

Tests of a module that are marked ``together`` run at the same time, in threads, because they mostly wait: those that
start commands, and use no other fixture than the three below and ``tmp_path``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.ddptrain.builders import SMALL, verb
from tests.ddptrain.runs import ForkServer, Lesson, Trained, Whole, fork_server
from tests.ddptrain.synthetic import write_idx

_AT_ONCE = 6
_OUTCOMES = pytest.StashKey[Future[None]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "together: waits most of the time; runs beside the others of its module")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run all tests of the group with the first of them; report the outcome of each when it is called."""
    if not _in_group(pyfuncitem):
        return None
    if _OUTCOMES not in pyfuncitem.stash:
        items = [item for item in pyfuncitem.session.items if isinstance(item, pytest.Function)]
        group = [item for item in items if item.module is pyfuncitem.module and _in_group(item)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for item in group:
                item.stash[_OUTCOMES] = pool.submit(item.function, **_arguments(item, pyfuncitem._request))
    pyfuncitem.stash[_OUTCOMES].result()
    return True


def _in_group(item: pytest.Function) -> bool:
    if item.get_closest_marker("together") is None:
        return False
    needed = _parameters(item)
    return "ddptrain" in needed and needed <= {"ddptrain", "idx", "whole", "tmp_path", *_given(item)}


def _parameters(item: pytest.Function) -> set[str]:
    return set(inspect.signature(item.function).parameters)


def _given(item: pytest.Function) -> dict[str, object]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def _arguments(item: pytest.Function, request: pytest.FixtureRequest) -> dict[str, object]:
    """Return the arguments of a test of the group; ``request`` is of the first of them."""
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    arguments = _given(item)
    for name in _parameters(item) - arguments.keys():
        arguments[name] = folders.mktemp("together") if name == "tmp_path" else request.getfixturevalue(name)
    return arguments


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
def lesson(_server: ForkServer) -> Lesson:
    """Return a function that runs ``ddptrain lesson`` with arguments, once in a session, and returns its output."""

    @cache
    def printed(*arguments: object) -> str:
        return _server.run("lesson", *arguments).output()

    return printed


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
