"""A thousand lives of a job on the in-memory cluster: whatever happens, the controller keeps its promises."""

import logging

import pytest

from tests.engine.memory_life import live

LIVES = 1000


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of expected warnings would only cost time."""
    logging.disable(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(3))
def test_a(seed: int) -> None:
    live(seed, troubled=False)
