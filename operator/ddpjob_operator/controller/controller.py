"""A reconciler with what it runs on: the work queue, the sweeps and the events. ``main`` runs it."""

import asyncio
import logging
from collections.abc import Iterable

from ddpjob.engine.scheduling.adapters import families
from ddpjob_operator.controller.reconcile import Reconciler
from ddpjob_operator.controller.sweep import Sweeper

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
FLUSH_SECONDS = 5.0


class Controller:
    """Reconciles every DDPJob of a cluster.

    scopes: namespaces to list, one request each; None lists all of them at once.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        *,
        scopes: tuple[str | None, ...] = (None,),
        sweep_seconds: float = 60.0,
    ) -> None:
        self.reconciler = reconciler
        self.sweeper = Sweeper(
            cluster=reconciler.cluster,
            cache=reconciler.cache,
            scopes=scopes,
            interval=sweep_seconds,
            families=families(reconciler.settings),
        )

    async def run(self, stop: asyncio.Event, others: Iterable["asyncio.Task[None]"] = ()) -> None:
        """Reconcile until ``stop`` is set, then let running reconciles end and send the events that wait.

        others: tasks without which it does not go on.
        If the call is cancelled, running reconciles still end, but waiting events are not sent.
        """
        parts = self.reconciler
        working = asyncio.create_task(parts.queue.run(parts.process, stop, GRACE_SECONDS), name="work queue")
        sweeping = asyncio.create_task(self.sweeper.run(), name="sweeper")
        try:
            # A task that returns before the stop has failed: its error is raised below.
            done, _ = await asyncio.wait({working, sweeping, *others}, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await asyncio.wait({working})
            await self._flush()
            for task in {*done, working}:
                task.result()
        finally:
            stop.set()
            await asyncio.wait({working})
            sweeping.cancel()
            await parts.close()

    async def _flush(self) -> None:
        """Wait up to 5 s until the waiting events are sent."""
        try:
            await asyncio.wait_for(self.reconciler.events.flush(), FLUSH_SECONDS)
        except TimeoutError:
            logger.warning("some events were not sent within %g s", FLUSH_SECONDS)
