"""A controller on a cluster in the process, as tests need it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.engine.actions import EngineSettings
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.controller.cache import WATCHED
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.reconcile import Controller
from tests.builders import SETTINGS
from tests.worlds.memory import MemoryCluster


def a_controller(
    cluster: MemoryCluster, *, progress_seconds: float = 10.0, settings: EngineSettings = SETTINGS, **options: Any
) -> Controller:
    """Return a controller whose delays follow the time of the running loop, which may be simulated.

    ``options``: of ``Controller``, with metrics of its own by default.
    """
    given: dict[str, Any] = {"metrics": Metrics(), "clock": lambda: asyncio.get_running_loop().time()} | options
    return Controller(cluster, settings, lambda on_news: ProgressPoller(progress_seconds, on_news), **given)


async def serve(controller: Controller, watch: Callable[..., AsyncIterator[Any]], scope: str | None = None) -> None:
    """Run until cancelled; ``watch`` of a resource yields the events of a scope that keep the cache up to date."""

    async def feed(resource: Resource) -> None:
        await controller.sweeper.filled(scope)
        async for event in watch(resource, label_selector=names.SELECTORS.get(resource)):
            controller.cache.take(resource, event)

    async with asyncio.TaskGroup() as group:
        for resource in WATCHED:
            group.create_task(feed(resource))
        group.create_task(controller.run(asyncio.Event()))
