"""Fixtures that more than one test folder uses."""

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane
from tests.controlplane import control_plane as running_control_plane
from tests.kind.toolchain import ToolchainError, binary

_numbers = itertools.count(1)

# Run in the background or under nohup, we would ignore these signals and so would every program that a test starts, for
# ignoring is inherited. What a handler catches is back at its default in a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """kube-apiserver and etcd for the whole run, with the CRD and an audit log of all writes."""
    try:
        for name in ("etcd", "kube-apiserver", "kubectl"):
            binary(name)
    except ToolchainError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no API server to test against: {error}".splitlines()[0])
    with running_control_plane(audit=True) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> str:
    """A namespace of the test's own. It goes away with the control plane."""
    name = f"test-{next(_numbers)}"
    control_plane.make_namespace(name)
    return name
