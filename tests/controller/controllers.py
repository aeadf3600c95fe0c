"""A controller on a cluster in the process, as tests need it."""

import asyncio
from typing import Any

from ddpjob.controller.controller import Controller
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.progress import ProgressPoller
from tests.builders import SETTINGS
from tests.memory import MemoryCluster


def a_controller(cluster: MemoryCluster, *, progress_seconds: float = 10.0, **options: Any) -> Controller:
    """Return a controller whose delays follow the time of the running loop, which may be simulated.

    ``options``: of ``Controller``, with metrics of its own by default.
    """
    given: dict[str, Any] = {"metrics": Metrics(), "clock": lambda: asyncio.get_running_loop().time()}
    return Controller(cluster, SETTINGS, lambda on_news: ProgressPoller(progress_seconds, on_news), **given | options)
