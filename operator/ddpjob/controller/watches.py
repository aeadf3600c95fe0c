"""Watch the jobs with kopf: each event updates the cache, which queues the job. ``podwatch`` watches the pods.

kopf's create, update and delete handlers, timers and indices are not used, because they need annotations, finalizers
and patches. kopf stops at any watch error except 410. It is restarted inside the process, because a restart of the
container would wait in CrashLoopBackOff.
"""

import asyncio
import contextlib
import logging
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import kopf

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob.cluster import job_json
from ddpjob.cluster.connection import ConfigurationError, Connection
from ddpjob.cluster.kubernetes import JOBS_PAGE_SIZE
from ddpjob.controller.cache import WATCHED, Cache
from ddpjob.controller.health import Verdict

logger = logging.getLogger(__name__)

SILENT_SECONDS = 90.0  # the API server sends a bookmark every minute
FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 0.1, 5.0
CALM_SECONDS = 60.0
STOP_SECONDS = 5.0
STRAY_ROUNDS, STRAY_SECONDS = 5, 0.5
KOPF_FOLDER = str(Path(kopf.__file__).parent)


@dataclass
class _Stream:
    response: aiohttp.ClientResponse
    received: int
    seen: float


class WatchMonitor:
    """Records which watches are open and when each last received data, including bookmarks.

    It is a middleware of the HTTP sessions of both watches, because kopf itself reports neither.
    """

    def __init__(
        self,
        server: str,
        scopes: Sequence[str | None],
        on_relist: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prefix = urllib.parse.urlsplit(server).path.rstrip("/")  # for example of a management proxy
        self._streams: dict[str, _Stream | None] = {
            f"{prefix}/{resource.path(scope)}": None for resource in WATCHED for scope in scopes
        }
        self._listed: set[str] = set()
        self._on_relist = on_relist
        self._clock = clock

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Record every successful LIST and watch."""
        response = await handler(request)
        path = request.url.path
        if response.status == 200 and path in self._streams:
            if request.url.query.get("watch") == "true":
                self._streams[path] = _Stream(response, 0, self._clock())
            elif path in self._listed:
                self._on_relist()  # no event reports objects that were deleted in between
            else:
                self._listed.add(path)
        return response

    def sample(self) -> None:
        """Record which watches received data since the last call; called about once a second."""
        for stream in self._streams.values():
            if stream is None:
                continue
            received = stream.response.content.total_raw_bytes
            if received != stream.received:
                stream.received, stream.seen = received, self._clock()

    def ages(self) -> dict[str, float]:
        """Return the seconds since each watch last received data, by path; infinite before it was opened."""
        now = self._clock()
        return {path: now - s.seen if s else float("inf") for path, s in self._streams.items()}

    def verdict(self) -> Verdict:
        """Return whether every watch is open and has received data within 90 s."""
        for path, age in self.ages().items():
            if age == float("inf"):
                return False, f"the watch of {path} is not open yet"
            if age > SILENT_SECONDS:
                return False, f"the watch of {path} has received no data for {age:.0f} s"
        return True, "ok"


def registry(cache: Cache, connection: Connection, monitor: WatchMonitor) -> kopf.OperatorRegistry:
    """Return kopf's handlers: one for the events of jobs, and the login."""
    handlers = kopf.OperatorRegistry()
    generation: int | None = None

    async def login(**_: Any) -> kopf.AiohttpSession:
        nonlocal generation
        if generation is not None:  # kopf calls login again only after a 401
            try:
                await connection.renew(generation)
            except ConfigurationError as error:
                raise kopf.LoginError(str(error)) from error
        generation = connection.generation
        session = connection.session(0, middlewares=(monitor.middleware, job_json.middleware))
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    async def take(event: Any, **_: Any) -> None:
        cache.take(names.DDPJOBS, event)

    kopf.on.login(registry=handlers)(login)
    kopf.on.event(names.GROUP, names.VERSION, names.DDPJOBS.plural, registry=handlers)(take)
    return handlers


class _NothingHandled(kopf.MultiDiffBaseStorage):
    """Disables kopf's comparison of each object with its last handled version, which only its other handlers need.

    Copying every object for the comparison takes a large part of the CPU time of an event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})


def _kopf_settings() -> kopf.OperatorSettings:
    """Return the settings for ``kopf.spawn_tasks``."""
    s = kopf.OperatorSettings()
    s.scanning.disabled = True
    s.posting.enabled = False
    s.persistence.diffbase_storage = _NothingHandled([])
    s.persistence.progress_storage = kopf.MultiProgressStorage([])
    s.watching.connect_timeout = 5
    s.watching.server_timeout = 300
    s.watching.client_timeout = 310
    s.watching.inactivity_timeout = 70
    s.networking.request_timeout = 10
    s.networking.error_backoffs = (0.5, 1, 2, 4)
    s.watching.chunk_size = JOBS_PAGE_SIZE
    s.queueing.worker_limit = None
    # A waiting worker of kopf keeps the whole object of its last event, which Python's garbage collector also visits
    # while it blocks the event loop.
    s.queueing.idle_timeout = 0.1
    # Otherwise kopf kills the whole process ten minutes after a restart of its tasks.
    s.process.ultimate_exiting_timeout = None
    return s


async def watch_until(
    stop: asyncio.Event,
    handlers: kopf.OperatorRegistry,
    namespaces: Sequence[str],
    *,
    on_start: Callable[[], None],
    on_restart: Callable[[], None],
) -> None:
    """Run kopf until ``stop`` is set, and restart it when it fails.

    on_start: called after each start, because kopf replaces the signal handlers.
    """
    loop = asyncio.get_running_loop()
    failures = 0
    while not stop.is_set():
        started = loop.time()
        await _run_kopf(stop, handlers, namespaces, on_start)
        if stop.is_set():
            return
        failures = 1 if loop.time() - started > CALM_SECONDS else failures + 1
        delay = doubling(FIRST_RESTART_SECONDS, failures, MAX_RESTART_SECONDS)
        on_restart()
        logger.warning("watching ended with an error, restarting in %g s", delay)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay)


async def _run_kopf(
    stop: asyncio.Event, handlers: kopf.OperatorRegistry, namespaces: Sequence[str], on_start: Callable[[], None]
) -> None:
    tasks = await kopf.spawn_tasks(
        registry=handlers,
        settings=_kopf_settings(),
        standalone=True,
        # By default kopf looks up the user's name, which a user id that a cluster assigned does not have.
        identity=cast(Any, names.MANAGED_BY),
        clusterwide=not namespaces,
        namespaces=list(namespaces),
    )
    on_start()
    stopped = asyncio.create_task(stop.wait())
    # Not kopf.run_tasks, which at its end cancels every task of the loop, including reconciles.
    await asyncio.wait({*tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            logger.error("%s: %s: %s", task.get_name(), type(error).__name__, error)
    await _cancel_strays()


async def _cancel_strays() -> None:
    """Cancel tasks that kopf leaves to ``run_tasks``; some need more than one cancellation."""
    for _ in range(STRAY_ROUNDS):
        code = {task: getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()}
        strays = {task for task in code if str(getattr(code[task], "co_filename", "")).startswith(KOPF_FOLDER)}
        if not strays:
            return
        for task in strays:
            task.cancel()
        done, _ = await asyncio.wait(strays, timeout=STRAY_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it
    logger.warning("some tasks of the last watches do not end; they are ignored")
