"""The operator process: connects to the API server, runs the controller and the watches, and shuts them down.

kopf's watch of jobs, watch of pods ─▶ cache ─▶ work queue ─▶ reconcile ─▶ API server
                          sweep ────▶ cache       ▲ progress poller
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import uvloop

from ddpjob import __version__
from ddpjob.api import names
from ddpjob.api.exit_codes import USAGE
from ddpjob.cluster.connection import ConfigurationError, Connection
from ddpjob.cluster.kubernetes import KubernetesCluster
from ddpjob.controller import logs, watches
from ddpjob.controller.controller import Controller
from ddpjob.controller.health import HealthServer, Heartbeat, Verdict
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.podwatch import PodWatch
from ddpjob.controller.progress import ProgressPoller
from ddpjob.controller.settings import Settings, SettingsError, parse
from ddpjob.engine.actions import EngineSettings

logger = logging.getLogger(__name__)

RECURSION_LIMIT = 50_000  # Python recurses up to three times per level


class Operator:
    """A controller with its connection, watches and health server; ``run`` returns after a stop signal."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._stop = asyncio.Event()
        self._metrics = metrics = Metrics()
        requests = settings.max_concurrent_requests
        self.cluster = KubernetesCluster(connection, max_connections=requests, observer=metrics.observe_request)
        self.controller = Controller(
            self.cluster,
            EngineSettings(settings.cluster_domain),
            lambda on_news: ProgressPoller(
                settings.progress_interval_seconds,
                on_news,
                on_poll=lambda result: metrics.progress_polls.labels(result).inc(),
            ),
            metrics=metrics,
            scopes=settings.scopes,
            workers=settings.max_concurrent_reconciles,
            # The other connections are for status patches, so that no large job delays another's decision.
            concurrent_requests=max(1, requests * 7 // 8),
            sweep_seconds=settings.sweep_interval_seconds,
            now=self.cluster.clock.now,
        )
        sweep_soon = self.controller.sweeper.want
        self._monitor = watches.WatchMonitor(connection.server, settings.scopes, on_relist=sweep_soon)
        self._heartbeat = Heartbeat()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then let running reconciles end and close all connections."""
        self._catch_signals()
        self._add_gauges()
        health = HealthServer(
            self._settings.health_host,
            self._settings.health_port,
            alive=self._heartbeat.verdict,
            ready=self._ready,
            metrics=self._metrics.render,
        )
        where = ", ".join(self._settings.namespaces) or "all namespaces"
        logger.info("ddpjob-operator %s serves %s; health on port %d", __version__, where, health.port)
        try:
            await self._serve()
        finally:
            await self.controller.poller.close()
            await self.cluster.close()
            await self._connection.close()
            health.close()
            logger.info("stopped")

    async def _serve(self) -> None:
        background = [asyncio.create_task(self._heartbeat.run(self._on_beat), name="heartbeat")]
        try:
            if not await self._until_stop(self.controller.sweeper.start()):
                return
            watching = asyncio.create_task(self._watch(), name="watching")
            background += [asyncio.create_task(watch.run(), name="watching pods") for watch in self._pod_watches()]
            working = asyncio.create_task(self.controller.run(self._stop), name="controller")
            # A task that returns before the stop has failed: the process ends with its error.
            done, _ = await asyncio.wait({watching, working, *background}, return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            await asyncio.wait({watching, working})
            for task in (*done, watching, working):
                task.result()
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)

    def _pod_watches(self) -> list[PodWatch]:
        """Return a watch of pods and one of Services for each scope, in the same way authorized as kopf's."""
        return [
            PodWatch(
                cluster=self.cluster,
                connection=self._connection,
                cache=self.controller.cache,
                scope=scope,
                resource=resource,
                session=partial(self._connection.session, 0, middlewares=(self._monitor.middleware,)),
                on_error=self._metrics.watch_restarts.inc,
            )
            for scope in self._settings.scopes
            for resource in (names.PODS, names.SERVICES)
        ]

    async def _watch(self) -> None:
        await watches.watch_until(
            self._stop,
            watches.registry(self.controller.cache, self._connection, self._monitor),
            self._settings.namespaces,
            on_start=self._catch_signals,
            on_restart=self._metrics.watch_restarts.inc,
        )

    async def _until_stop(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run ``work`` until it ends or the process is asked to stop; return whether it ended."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        logger.info("%s: stopping", number.name)
        self._stop.set()

    def _ready(self) -> Verdict:
        """Return whether the watches are open, and every status can be written."""
        watching, why = self._monitor.verdict()
        return self.controller.schema.verdict() if watching else (watching, why)

    def _on_beat(self, lag: float) -> None:
        self._metrics.loop_lag.set(lag)
        self._monitor.sample()

    def _add_gauges(self) -> None:
        metrics = self._metrics
        metrics.gauge(
            "ddpjob_queue_depth", "Number of jobs that wait for a worker.", lambda: float(self.controller.queue.depth)
        )
        metrics.gauges_by("ddpjob_jobs", "Number of jobs, by state.", "state", self.controller.cache.count_states)
        metrics.gauges_by(
            "ddpjob_watch_age_seconds",
            "Seconds since each watch last received data, by URL path.",
            "path",
            self._monitor.ages,
        )


async def serve(settings: Settings) -> None:
    """Connect and run. Raises ``ConfigurationError`` if there is no cluster to connect to."""
    connection = await Connection.open(settings.kubeconfig)
    await Operator(settings, connection).run()


def allow_deep_objects() -> None:
    """Let Python read every object that an API server stores; with its own limit, one job would end every listing.

    The Go JSON decoder of the API server accepts 10,000 levels. A spec with more than 100 then becomes Invalid.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point ``ddpjob-operator``. Exit codes: 0 after a stop signal, 1 on failure, 2 on wrong settings."""
    try:
        settings = parse(argv)
    except SettingsError as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return USAGE
    allow_deep_objects()
    logs.configure(settings.log_level, settings.log_format)
    # Full garbage collections block the event loop; without the modules' 90,000 objects they are several times faster.
    gc.collect()
    gc.freeze()
    try:
        uvloop.run(serve(settings))
    except (ConfigurationError, OSError) as error:
        logger.error("cannot start: %s", error)
        return 1
    except Exception:
        logger.exception("internal error: the operator exits; running jobs continue")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
