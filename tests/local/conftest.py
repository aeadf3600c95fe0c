"""A state folder for sessions that are cancelled at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.local.sessions import Place, end


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path / "state")
    yield made
    await end(made.runs)
