"""Fixtures of more than one test folder."""

import gc
import itertools
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.soak import leave_out
from tests.worlds.control_plane import ControlPlane
from tests.worlds.control_plane import control_plane as running_control_plane
from tests.worlds.fault_proxy import FaultProxy

_numbers = itertools.count(1)

# No time limit per example, because other work may run on the machine; the same examples in every run of CI.
settings.register_profile("shared-machine", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("shared-machine")

# In the background or under nohup, the test run ignores these signals, and every program that a test starts inherits
# that. A signal with a handler is reset to its default in a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items)


def pytest_collection_finish() -> None:
    """Let garbage collections skip what is imported and collected by now, all of which stays until the end."""
    gc.freeze()


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Run kube-apiserver and etcd for the whole session, with the CRD and an audit log of all writes."""
    with running_control_plane(audit=True) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    """Make a namespace for one test and return its name. It is deleted with the control plane."""
    name = f"test-{next(_numbers)}"
    control_plane.make_namespace(name)
    return name


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    """Provide a proxy of the API server that injects faults."""
    with FaultProxy(control_plane) as made:
        yield made
