"""DDPJob: runs one PyTorch training with one pod per node and restarts all pods together on a failure.

The Python API: ``from ddpjob import Client, DDPJob`` (docs/tasks/python.md). Importing this package imports
nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ddpjob.version import __version__ as __version__

if TYPE_CHECKING:
    from ddpjob.client.base import Client as Client
    from ddpjob.client.job import DDPJob as DDPJob
    from ddpjob.client.log_lines import LogLine as LogLine
    from ddpjob.client.verdict.explanation import Explanation as Explanation
    from ddpjob.errors import DDPJobError as DDPJobError

_PUBLIC = {
    "Client": "ddpjob.client.base",
    "LogLine": "ddpjob.client.log_lines",
    "DDPJob": "ddpjob.client.job",
    "Explanation": "ddpjob.client.verdict.explanation",
    "DDPJobError": "ddpjob.errors",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
