"""Watch the jobs of one scope with kopf: each event updates the cache, which queues the job.

kopf runs in a thread with an event loop of its own, as its documentation describes for embedding. When the thread
ends, or its watch stays closed, the thread is replaced: all tasks and connections of kopf end with its loop. kopf's
create, update and delete handlers, timers and indices are not used, because they need annotations, finalizers and
patches. ``object_watch`` watches the pods.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import kopf
import uvloop

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob_operator.cluster import job_json
from ddpjob_operator.cluster.connection import ConfigurationError, Connection
from ddpjob_operator.cluster.kubernetes import CONNECT_SECONDS, JOBS_PAGE_SIZE
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.watch_status import (
    CALM_SECONDS,
    FIRST_RESTART_SECONDS,
    MAX_RESTART_SECONDS,
    SILENT_SECONDS,
    WatchStatus,
)

logger = logging.getLogger(__name__)

STALL_SECONDS = 20.0
"""kopf sends a request at least this often until its watch is open; no request takes longer."""
CHECK_SECONDS = 1.0
REQUEST_SECONDS = 10.0
STOP_SECONDS = 10.0
STACK_BYTES = 64 * 2**20
"""A job may be nested 10,000 levels deep, and the JSON parser is recursive. Only pages that are used take memory."""
NO_FINALIZER = "kopf sets no finalizer"
"""Not a valid name, so no object has it: kopf would remove its finalizer from a job, which it has no right to patch."""


@dataclass(kw_only=True)
class JobWatch:
    """Keeps the jobs of one scope up to date in the cache; ``run`` never ends by itself.

    scope: the namespace, or None for all.
    """

    connection: Connection
    cache: Cache
    scope: str | None
    status: WatchStatus

    async def run(self) -> None:
        """Run kopf until cancelled; start it again, with growing delay, whenever it ends or its watch is not open."""
        await self.status.keep_open(self._run_once)

    async def _run_once(self) -> float:
        thread = KopfThread(self)
        try:
            await self._until_broken(thread)
        finally:
            await thread.stop()
        return 0.0

    async def _until_broken(self, thread: "KopfThread") -> None:
        """Wait until kopf is to be replaced, and note why."""
        status = self.status
        started = time.monotonic()
        while not thread.ended.done():
            await asyncio.wait({thread.ended}, timeout=CHECK_SECONDS)
            running = time.monotonic() - started
            if not status.is_open and min(status.idle_seconds, running) > STALL_SECONDS:
                status.fail(f"kopf has sent no request for {STALL_SECONDS:g} s", explains=False)
                return
            if status.is_open and min(status.age, running) > SILENT_SECONDS + STALL_SECONDS:
                status.fail(f"no data for {status.age:.0f} s", explains=False)
                return
        if not status.is_failing:
            status.fail(thread.ended.result())


class KopfThread:
    """One run of kopf's operator. ``ended`` is done when the thread has ended; its result says why.

    Handlers are called in the thread; what they report is passed to the event loop that made this object.
    """

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._main = asyncio.get_running_loop()
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_stopped = False
        self._generation: int | None = None
        self._refused, self._refused_at = 0, -math.inf
        self.ended: asyncio.Future[str] = self._main.create_future()
        self._thread = threading.Thread(target=self._run, name=f"kopf {watch.scope or 'all namespaces'}", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    async def stop(self) -> None:
        """Ask kopf to stop, and wait until its thread has ended. A thread that hangs is left behind."""
        self._is_stopped = True
        if self._stop is not None:
            loop, flag = self._stop
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(flag.set)
        done, _ = await asyncio.wait({self.ended}, timeout=STOP_SECONDS)
        if done:
            self._thread.join()  # nothing is left that it could wait for
        else:
            logger.error("a thread of kopf does not end within %g s; it is left behind", STOP_SECONDS)

    def _run(self) -> None:
        why = "kopf ended"
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except (Exception, asyncio.CancelledError) as error:  # kopf raises what its tasks raised
            why = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the process ends
            self._main.call_soon_threadsafe(self.ended.set_result, why)

    async def _serve(self) -> None:
        flag = asyncio.Event()
        self._stop = asyncio.get_running_loop(), flag
        if self._is_stopped:  # before it could set the flag
            return
        handlers = kopf.OperatorRegistry()
        kopf.on.startup(registry=handlers)(configure)
        kopf.on.login(registry=handlers)(self._login)
        kopf.on.event(names.GROUP, names.VERSION, names.DDPJOBS.plural, registry=handlers)(self._take)
        scope = self._watch.scope
        await kopf.operator(
            registry=handlers,
            stop_flag=flag,
            standalone=True,
            # By default kopf looks up the user's name, which a user id that a cluster assigned does not have.
            identity=cast(Any, names.MANAGED_BY),
            clusterwide=scope is None,
            namespaces=[] if scope is None else [scope],
        )

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        connection, now = self._watch.connection, time.monotonic()
        # kopf calls login again only after a 401, and then repeats its request at once.
        if self._generation is not None:
            # A rotated token is read without a delay; credentials that are refused again, ever later.
            self._refused = 0 if now - self._refused_at > CALM_SECONDS else self._refused + 1
            self._refused_at = now
            if self._refused:
                await asyncio.sleep(doubling(FIRST_RESTART_SECONDS, self._refused, MAX_RESTART_SECONDS))
            renewing = asyncio.run_coroutine_threadsafe(connection.renew(self._generation), self._main)
            try:
                await asyncio.wrap_future(renewing)
            except ConfigurationError as error:
                raise kopf.LoginError(str(error)) from error
        self._generation = connection.generation
        session = connection.session(0, middlewares=(self._watch.status.middleware, job_json.middleware))
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    async def _take(self, event: Any, **_: Any) -> None:
        self._main.call_soon_threadsafe(self._watch.cache.take, names.DDPJOBS, event)


async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Set what this operator needs of kopf."""
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.finalizer = NO_FINALIZER
    settings.persistence.diffbase_storage = _NothingHandled([])
    settings.persistence.progress_storage = kopf.MultiProgressStorage([])
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.inactivity_timeout = 70
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.error_backoffs = (0.5, 1, 2, 4)
    settings.watching.chunk_size = JOBS_PAGE_SIZE
    settings.queueing.worker_limit = None
    # A waiting worker of kopf keeps the whole object of its last event, which Python's garbage collector also visits
    # while it blocks the event loop.
    settings.queueing.idle_timeout = 0.1
    # Otherwise kopf kills the whole process ten minutes after one of its threads ended.
    settings.process.ultimate_exiting_timeout = None


class _NothingHandled(kopf.MultiDiffBaseStorage):
    """Disables kopf's comparison of each object with its last handled version, which only its other handlers need.

    Copying every object for the comparison takes a large part of the CPU time of an event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})
