"""The fork server, and data and trainings for a whole session."""

from tests.ddptrain.fixtures import (  # noqa: F401
    _server,
    ddptrain,
    idx,
    lesson,
    pytest_configure,
    pytest_pyfunc_call,
    whole,
)
