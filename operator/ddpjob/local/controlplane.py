"""The operator's own parts on the in-memory cluster: what reconciles here is what reconciles in a cluster."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import datetime

from ddpjob.api import names
from ddpjob.cluster.base import NotFound
from ddpjob.cluster.memory import Call, Fault, MemoryCluster
from ddpjob.controller.apply import Executor
from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.events import EventSender
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.progress import ProgressPoller, Target
from ddpjob.controller.reconcile import Reconciler
from ddpjob.controller.sweep import Sweeper
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.engine.actions import EngineSettings
from ddpjob.local.resources import Ports

_CONCURRENT_REQUESTS = 64
_SWEEP_SECONDS = 60.0
_FLUSH_SECONDS = 5.0


class LocalPoller(ProgressPoller):
    """Asks a pod at the port that stands for its own on this machine."""

    def __init__(self, interval: float, on_news: Callable[[Key], None], ports: Ports) -> None:
        super().__init__(interval, on_news)
        self._ports = ports

    def follow(self, key: Key, target: Target | None) -> None:
        """As in ``ProgressPoller``, with the port as the engine names it."""
        if target is not None:
            pod, address, port = target
            target = pod, address, self._ports.of(pod, port)
        super().follow(key, target)


class ControlPlane:
    """Everything between the API server and the plans; ``run`` it beside the kubelet."""

    def __init__(
        self,
        cluster: MemoryCluster,
        ports: Ports,
        settings: EngineSettings,
        *,
        progress_seconds: float,
        now: Callable[[], datetime],
    ) -> None:
        cluster.hook = _keep_the_job
        self._cluster = cluster
        self._cache = Cache(on_change=self._wake)
        self._poller = LocalPoller(progress_seconds, self._wake, ports)
        self._events = EventSender(cluster)
        metrics = Metrics()
        reconciler = Reconciler(
            cluster=cluster,
            cache=self._cache,
            executor=Executor(cluster, self._cache, _CONCURRENT_REQUESTS),
            poller=self._poller,
            events=self._events,
            metrics=metrics,
            settings=settings,
            now=now,
        )
        self._queue = reconciler.queue = WorkQueue(reconciler.process, 1)
        self._sweeper = Sweeper(
            cluster=cluster,
            cache=self._cache,
            queue=self._queue,
            scopes=(None,),
            interval=_SWEEP_SECONDS,
            metrics=metrics,
        )

    async def run(self) -> None:
        """For ever; cancelled, it ends the reconcile at hand first."""
        stop = asyncio.Event()
        await self._sweeper.start()
        queue = asyncio.create_task(self._queue.run(stop), name="work queue")
        try:
            async with asyncio.TaskGroup() as group:
                for resource in (names.DDPJOBS, names.PODS):
                    group.create_task(self._feed(resource))
                group.create_task(self._sweeper.run())
                group.create_task(self._events.run())
        finally:
            stop.set()
            await queue
            await self._poller.close()

    async def flush(self) -> None:
        """Wait until the events that were announced are stored."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._events.flush(), _FLUSH_SECONDS)

    def _wake(self, key: Key) -> None:
        self._queue.add(key)

    async def _feed(self, resource: names.Resource) -> None:
        async for event in self._cluster.watch(resource):
            self._cache.take(resource, event)


def _keep_the_job(call: Call) -> Fault | None:
    """ttlSecondsAfterFinished: here the record of a job goes with `ddpjob delete`, or with the next run."""
    if call.verb == "delete" and call.resource is names.DDPJOBS:
        return Fault(before=NotFound("local mode keeps the record of a finished job", code=404))
    return None
