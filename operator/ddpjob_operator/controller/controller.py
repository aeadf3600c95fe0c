"""The controller's parts, wired for one cluster. ``main`` runs them."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime

from ddpjob.api.names import Key
from ddpjob.clock import SteadyClock
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.scheduling.adapters import families
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.cluster.base import Cluster
from ddpjob_operator.controller.apply import Executor
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.pod_logs import PodLogs
from ddpjob_operator.controller.reconcile import Reconciler
from ddpjob_operator.controller.schema import SchemaMonitor
from ddpjob_operator.controller.sweep import Sweeper
from ddpjob_operator.controller.unbound_claims import UnboundClaims
from ddpjob_operator.controller.workloads import Workloads
from ddpjob_operator.controller.workqueue import WorkQueue

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
FLUSH_SECONDS = 5.0


class Controller:
    """Reconciles every DDPJob of ``cluster``.

    make_poller: returns the progress poller, given the function to call with the key of a job that made progress.
    scopes: namespaces to list, one request each; None lists all of them at once.
    on_rollback: called with a scope whose watches must list again, because versions went back.
    clock: monotonic seconds, for delays. now: the time that is written into the status; by default ``SteadyClock``.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: EngineSettings,
        make_poller: Callable[[Callable[[Key], None]], ProgressPoller],
        *,
        metrics: Metrics,
        scopes: tuple[str | None, ...] = (None,),
        workers: int = 1,
        concurrent_requests: int = 64,
        sweep_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] | None = None,
        on_rollback: Callable[[str | None], None] = lambda scope: None,
    ) -> None:
        self.now = now or SteadyClock().now
        self.queue = WorkQueue(workers)
        self.cache = Cache(on_change=self.queue.add, on_update=self.queue.add_soon, now=self.now)
        self.poller = make_poller(self.queue.add)
        self.claims = UnboundClaims(cluster, self.queue.add)
        self.pod_logs = PodLogs(cluster, self.queue.add)
        self.events = EventSender(cluster)
        self.schema = SchemaMonitor()
        workloads = Workloads(cluster, self.cache, clock, uses_kueue=bool(settings.kueue))
        self.sweeper = Sweeper(
            cluster=cluster,
            cache=self.cache,
            scopes=scopes,
            interval=sweep_seconds,
            metrics=metrics,
            families=families(settings),
            on_rollback=on_rollback,
        )
        self._reconciler = Reconciler(
            cluster=cluster,
            cache=self.cache,
            queue=self.queue,
            executor=Executor(cluster, self.cache, concurrent_requests, self.events.send),
            poller=self.poller,
            claims=self.claims,
            workloads=workloads,
            pod_logs=self.pod_logs,
            events=self.events,
            metrics=metrics,
            schema=self.schema,
            settings=settings,
            served=lambda: self.sweeper.served,
            clock=clock,
            now=self.now,
        )
        self.cache.on_freed = self._reconciler.refused_jobs.freed

    async def run(self, stop: asyncio.Event) -> None:
        """Reconcile until ``stop`` is set, then let running reconciles end and send the events that wait.

        If the call is cancelled, running reconciles still end, but waiting events are not sent.
        """
        working = asyncio.create_task(self.queue.run(self._reconciler.process, stop, GRACE_SECONDS), name="work queue")
        sweeping = asyncio.create_task(self.sweeper.run(), name="sweeper")
        try:
            # A task that returns before the stop has failed: its error is raised below.
            done, _ = await asyncio.wait({working, sweeping}, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await asyncio.wait({working})
            await self.flush()
            for task in {*done, working}:
                task.result()
        finally:
            stop.set()
            await asyncio.wait({working})
            sweeping.cancel()
            self.events.close()
            self.claims.close()
            self.pod_logs.close()
            await self.poller.close()

    async def flush(self) -> None:
        """Wait up to 5 s until the waiting events are sent."""
        try:
            await asyncio.wait_for(self.events.flush(), FLUSH_SECONDS)
        except TimeoutError:
            logger.warning("some events were not sent within %g s", FLUSH_SECONDS)
