"""The operator process: connects to the API server, runs the controller and the watches, and shuts them down.

kopf's watch of jobs, watch of pods ─▶ cache ─▶ work queue ─▶ reconcile ─▶ API server
                          sweep ────▶ cache       ▲ progress poller
"""

import asyncio
import gc
import logging
import math
import signal
import sys
import urllib.parse
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

import uvloop

from ddpjob.api import names
from ddpjob.api.exit_codes import USAGE
from ddpjob.api.names import Resource
from ddpjob.engine.scheduling.adapters import families
from ddpjob.progress.poller import ProgressPoller
from ddpjob.version import __version__
from ddpjob_operator.cluster.connection import ConfigurationError, Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from ddpjob_operator.controller import logs, watch_status
from ddpjob_operator.controller.cache import WATCHED
from ddpjob_operator.controller.health import HealthServer, LoopHeartbeat, Verdict
from ddpjob_operator.controller.job_watch import JobWatch
from ddpjob_operator.controller.leadership import Leadership, LeadershipLostError
from ddpjob_operator.controller.listing import VersionsWentBackError
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.object_watch import ObjectWatch
from ddpjob_operator.controller.reconcile import Controller
from ddpjob_operator.controller.settings import VARIABLES, ControllerSettings, SettingsError, parse
from ddpjob_operator.controller.sweep import OPTIONAL
from ddpjob_operator.controller.watch_status import Report, WatchStatus

logger = logging.getLogger(__name__)

_DESCRIPTION = (
    "Runs DDPJobs: multi-node PyTorch training on Kubernetes. Settings are environment variables "
    f"(docs/tasks/operations.md): {', '.join(VARIABLES)}."
)
RECURSION_LIMIT = 50_000  # Python recurses up to three times per level
WORKERS = 8
"""Jobs that are reconciled at the same time, and one more in each namespace that would have none."""


Watch = ObjectWatch | JobWatch


class Operator:
    """A controller with its connection, watches and health server; ``run`` returns after a stop signal."""

    def __init__(self, settings: ControllerSettings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._stop = asyncio.Event()
        self._metrics = metrics = Metrics()
        requests = settings.max_concurrent_requests
        self.cluster = KubernetesCluster(connection, max_connections=requests, observer=metrics.observe_request)
        self.controller = Controller(
            self.cluster,
            settings.engine,
            lambda on_news: ProgressPoller(
                settings.progress_interval_seconds,
                on_news,
                on_poll=lambda result: metrics.progress_polls.labels(result).inc(),
            ),
            metrics,
            scopes=settings.scopes,
            sweep_seconds=settings.sweep_interval_seconds,
            workers=WORKERS,
            # The other connections are for status patches, so that no large job delays another's decision.
            concurrent_requests=max(1, requests * 7 // 8),
            now=self.cluster.clock.now,
        )
        self._watches: dict[str | None, list[Watch]] = {}
        self._heartbeat = LoopHeartbeat()
        # Requests for jobs may use all connections for seconds; the Lease must be renewed meanwhile.
        self._lease_cluster = KubernetesCluster(connection, max_connections=1, observer=metrics.observe_request)
        self._leadership = None
        if settings.lease:
            namespace, name = settings.lease.split("/")
            self._leadership = Leadership(self._lease_cluster, namespace, name, settings.identity, self.controller.now)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then let running reconciles end and close all connections."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        kinds = (*WATCHED, *(kind for family in families(self._settings.engine) for kind in family))
        self._watches = {scope: [self._watch_of(kind, scope) for kind in kinds] for scope in self._settings.scopes}
        self._add_gauges()
        health = HealthServer(
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
            await self._lease_cluster.close()
            health.close()
            logger.info("stopped")

    async def _serve(self) -> None:
        background = [asyncio.create_task(self._heartbeat.run(self._on_beat), name="heartbeat")]
        try:
            if self._leadership is None or await self._leadership.acquire(self._stop):
                await self._work(background)
        finally:
            for task in background:
                task.cancel()
            # kopf may take five seconds to end. It only reads, so the standby need not wait for it.
            await asyncio.gather(asyncio.wait(background), self._release())

    async def _release(self) -> None:
        if self._leadership is not None:
            await self._leadership.release()

    async def _work(self, background: list["asyncio.Task[None]"]) -> None:
        """Reconcile until the stop; tasks that the caller cancels are added to ``background``."""
        if self._leadership is not None:
            background.append(asyncio.create_task(self._leadership.keep(), name="leadership"))
        for scope, watches in self._watches.items():
            background += [asyncio.create_task(self._watch(scope, watch), name="watching") for watch in watches]
        await self.controller.run(self._stop, background)

    async def _watch(self, scope: str | None, watch: Watch) -> None:
        """Watch once the scope is listed: a job must not be reconciled before its pods are cached."""
        await self.controller.sweeper.filled(scope)
        if watch.status.resource in names.SCHEDULING_KINDS:
            await self.controller.sweeper.serves(watch.status.resource)
        await watch.run()

    def _watch_of(self, resource: Resource, scope: str | None) -> Watch:
        cache, connection = self.controller.cache, self._connection
        sweep_soon = partial(self.controller.sweeper.want, scope)
        status = WatchStatus(
            resource,
            scope,
            server_path=urllib.parse.urlsplit(connection.server).path,
            on_failure=self._metrics.watch_restarts.inc,
            on_relist=partial(asyncio.get_running_loop().call_soon_threadsafe, sweep_soon),
        )
        if resource is names.DDPJOBS:
            return JobWatch(connection=connection, cache=cache, scope=scope, status=status)
        return ObjectWatch(cluster=self.cluster, connection=connection, cache=cache, scope=scope, status=status)

    def _on_signal(self, number: signal.Signals) -> None:
        logger.info("%s: stopping", number.name)
        self._stop.set()

    def _ready(self) -> Verdict:
        """Return whether the scopes are served, and every status can be written. A standby is ready to take over.

        Called in another thread.
        """
        if self._leadership is not None and not self._is_leader:
            return self._leadership.standby()
        served, detail = watch_status.readiness(self._reports())
        written, why = self.controller.writes()
        return (served, detail) if written or not served else (written, why)

    @property
    def _is_leader(self) -> bool:
        return self._leadership is None or self._leadership.is_leader

    def _reports(self) -> dict[str | None, Report]:
        """Return whether each scope is listed and watched."""
        failures = self.controller.sweeper.failures
        return {
            scope: watch_status.scope_report(
                failures.get(scope, ""),
                [watch.status for watch in watches if watch.status.resource not in OPTIONAL],
            )
            for scope, watches in self._watches.items()
        }

    def _statuses(self) -> list[WatchStatus]:
        return [watch.status for watches in self._watches.values() for watch in watches]

    def _on_beat(self, lag: float) -> None:
        self._metrics.loop_lag.set(lag)
        for status in self._statuses():
            status.sample()

    def _add_gauges(self) -> None:
        metrics = self._metrics
        metrics.gauge(
            "ddpjob_queue_depth", "Number of jobs that wait for a worker.", lambda: float(self.controller.queue.depth)
        )
        metrics.gauge(
            "ddpjob_leader",
            "Whether this replica reconciles (1) or is on standby (0).",
            lambda: float(self._is_leader),
        )
        metrics.jobs(self.controller.cache.job_facts, per_job=self._settings.metrics_per_job)
        metrics.gauges_by(
            "ddpjob_watch_age_seconds",
            "Seconds since each watch that was opened last received data, by URL path.",
            ["path"],
            lambda: {status.path: status.age for status in self._statuses() if status.age < math.inf},
        )
        metrics.gauges_by(
            "ddpjob_namespace_served",
            "Whether a namespace is listed and watched (1) or not (0). Without namespace: all namespaces.",
            ["namespace"],
            lambda: {
                scope or "": float(state == "open") for scope, (state, _) in self._reports().items() if self._is_leader
            },
        )


async def serve(settings: ControllerSettings) -> None:
    """Connect and run. Raises ``ConfigurationError`` if there is no cluster to connect to."""
    connection = await Connection.open()
    await Operator(settings, connection).run()


def allow_deep_objects() -> None:
    """Let Python read every object that an API server stores; with its own limit, one job would end every listing.

    The Go JSON decoder of the API server accepts 10,000 levels. A spec with more than 100 then becomes Invalid.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point ``ddpjob-operator``. Exit codes: 0 after a stop signal, 1 on failure, 2 on wrong settings."""
    command_line = ArgumentParser(prog="ddpjob-operator", description=_DESCRIPTION)
    command_line.add_argument("--version", action="version", version=f"ddpjob-operator {__version__}")
    command_line.parse_args(argv)
    try:
        settings = parse()
    except SettingsError as error:
        print(f"ddpjob-operator: {error}", file=sys.stderr)  # noqa: T201 - logging is not set up yet
        return USAGE
    allow_deep_objects()
    logs.configure(settings.log_level)
    # Full garbage collections block the event loop; without the modules' 90,000 objects they are several times faster.
    gc.collect()
    gc.freeze()
    try:
        uvloop.run(serve(settings))
    except (ConfigurationError, OSError) as error:
        logger.error("cannot start: %s", error)
        return 1
    except (LeadershipLostError, VersionsWentBackError) as error:
        logger.error("%s: this process ends, and is started again", error)
        return 1
    except Exception:
        logger.exception("internal error: the operator exits; running jobs continue")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
