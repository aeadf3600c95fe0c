"""The control plane of the runs."""

from collections.abc import Iterator

import pytest

from tests.worlds.control_plane import ControlPlane, control_plane


@pytest.fixture(scope="package")
def collecting_plane() -> Iterator[ControlPlane]:
    """Run a control plane with garbage collection, because a job's objects must go with it."""
    with control_plane(controller_manager=True) as plane:
        yield plane
