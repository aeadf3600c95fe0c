"""What `make soak` runs in addition to `make test`: tests with the marker ``soak``, and all samples if ``ALL``.

The marker is for a test whose rule a cheaper test proves at each landing (docs/develop/decisions/0021).
"""

import os

import pytest

ALL = os.environ.get("DDPJOB_TEST_FAULTS") == "all"
"""Whether everything runs, as in `make soak`."""


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests with the marker from the collected tests, except in `make soak`."""
    left = [] if ALL else [item for item in items if item.get_closest_marker("soak")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
