"""Look up what `python -m tests.kind prepare` built. A test that needs something missing is skipped, or fails in CI."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from tests.kind.toolchain import ToolchainError, binary


def program(name: str) -> Path:
    """Return the path of a pinned program. Skip the calling test if it is not built; with CI=true raise instead."""
    try:
        return binary(name)
    except ToolchainError as error:
        skip_unless_ci(error)


def skip_unless_ci(error: Exception) -> NoReturn:
    """Skip the calling test with the error's first line as the reason; with CI=true raise the error."""
    if os.environ.get("CI") == "true":
        raise error
    pytest.skip(str(error).splitlines()[0])
