"""The processes on which the simulated runs are carried out."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.parallel import pool


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPoolExecutor]:
    with pool() as processes:
        yield processes
