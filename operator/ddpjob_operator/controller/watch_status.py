"""What is known of each watch: whether it is open, when it last received data, and why it is not open.

The HTTP session of a watch records this as a middleware, because kopf reports neither. A watch may run in a thread of
its own; others read its status.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Literal

import aiohttp

from ddpjob.api.backoff import doubling
from ddpjob.api.names import Resource
from ddpjob_operator.controller.health import Verdict

logger = logging.getLogger(__name__)

SILENT_SECONDS = 90.0
"""The API server sends a bookmark every minute, so a watch without data for this time is not one."""

FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 0.1, 5.0
CALM_SECONDS = 10.0
"""A watch that was open for so long is opened again after ``FIRST_RESTART_SECONDS``."""

State = Literal["starting", "open", "failing"]
Report = tuple[State, str]
"""The state of a watch or of a scope, and one line about it unless it is open."""


class WatchStatus:
    """The status of the watch of one kind in one scope.

    server_path: path of the API server's URL, for example behind a management proxy.
    on_failure: called for every failure. on_relist: called when a LIST was repeated: no event then reports objects that
    were deleted in between. Both may be called in the thread of the watch.
    """

    def __init__(
        self,
        resource: Resource,
        scope: str | None,
        *,
        server_path: str = "",
        on_failure: Callable[[], None] = lambda: None,
        on_relist: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resource = resource
        self.path = f"{server_path.rstrip('/')}/{resource.path(scope)}"
        self._on_failure = on_failure
        self._on_relist = on_relist
        self._clock = clock
        self._is_listed = False
        self._response: aiohttp.ClientResponse | None = None
        self._received = 0
        self._is_silent = False
        self._heard: float | None = None
        self._active = clock()
        self._failure = ""
        self._is_refused = False  # by an answer of the API server, since the watch was open last

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Record the response to a LIST, a watch or discovery, or why there is none."""
        self._active = self._clock()
        try:
            response = await handler(request)
        except aiohttp.SocketTimeoutError:
            raise  # a connection that gives no response explains nothing
        except Exception as error:
            # Of the class itself only if the session was closed: the watch is replaced, and why is noted already. The
            # session of credentials that are refused is replaced while it has requests: the refusal explains more.
            is_replaced = self._is_refused and isinstance(error, aiohttp.ServerDisconnectedError)
            if not (is_replaced or type(error) is aiohttp.ClientConnectionError):
                self.fail(f"{type(error).__name__}: {error}")
            raise
        self._active = self._clock()
        if request.url.path == self.path:
            self._note(response, is_watch=request.url.query.get("watch") == "true")
        elif response.status not in (200, 404):  # of discovery, without which kopf watches nothing
            self._refuse(response)
        return response

    def _note(self, response: aiohttp.ClientResponse, *, is_watch: bool) -> None:
        if response.status == 410:
            return  # the watch begins again with a LIST
        if response.status != 200:
            self._refuse(response)
        elif is_watch:
            self._open(response)
        elif self._is_listed:
            self._on_relist()
        else:
            self._is_listed = True

    def _refuse(self, response: aiohttp.ClientResponse) -> None:
        self._is_refused = True
        self.fail(f"the API server answered {response.status} {response.reason or ''}".rstrip())

    def _open(self, response: aiohttp.ClientResponse) -> None:
        """Note a new stream. It counts as data only if the stream before it was not silent without an explanation."""
        if not self._is_silent:
            self._heard = self._clock()
        self._is_silent = True
        if self._failure:
            logger.info("the watch of %s is open again", self.path)
        self._response, self._received, self._failure, self._is_refused = response, 0, "", False

    def fail(self, why: str, *, explains: bool = True) -> None:
        """Note that the watch cannot be opened, or that it was ended by an error; log it unless it is known.

        explains: the API server or the network said so, and not only a stream without data.
        """
        if explains:
            self._is_silent = False
        self._response = None
        self._on_failure()
        level = logging.DEBUG if why == self._failure else logging.WARNING
        logger.log(level, "the watch of %s failed: %s", self.path, why)
        self._failure = why

    def sample(self) -> None:
        """Record whether data has arrived since the last call; called about once a second."""
        response = self._response
        if response is not None and (received := response.content.total_raw_bytes) != self._received:
            self._received, self._heard, self._is_silent = received, self._clock(), False

    async def keep_open(self, watch: Callable[[], Awaitable[float]]) -> None:
        """Call ``watch`` again, with growing delay, whenever it ends; it returns the seconds to wait at least."""
        clock, failures = asyncio.get_running_loop().time, 0
        self._active = self._clock()  # the time before does not count
        while True:
            started = clock()
            pause = await watch()
            failures = 1 if clock() - started > CALM_SECONDS else failures + 1
            await asyncio.sleep(max(pause, doubling(FIRST_RESTART_SECONDS, failures, MAX_RESTART_SECONDS)))

    @property
    def is_open(self) -> bool:
        return self._response is not None

    @property
    def is_failing(self) -> bool:
        return bool(self._failure)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request or response."""
        return self._clock() - self._active

    @property
    def age(self) -> float:
        """Seconds since the watch last received data; infinite before it was first opened."""
        return math.inf if self._heard is None else self._clock() - self._heard

    def report(self) -> Report:
        if self._failure:
            return "failing", f"the watch of {self.path} is not open: {self._failure}"
        if self._heard is None:
            return "starting", f"the watch of {self.path} is not open yet"
        if self.age > SILENT_SECONDS:
            return "failing", f"the watch of {self.path} has received no data for {self.age:.0f} s"
        return "open", ""


def scope_report(failure: str, statuses: Iterable[WatchStatus]) -> Report:
    """Return the state of a scope, of which ``statuses`` are the watches; ``failure``: why it cannot be listed."""
    reports: list[Report] = [("failing", failure)] if failure else [status.report() for status in statuses]
    return min(reports, key=lambda report: ("failing", "starting", "open").index(report[0]), default=("open", ""))


def readiness(reports: Mapping[str | None, Report]) -> Verdict:
    """Return whether a scope is served and none is still starting, with those that are not served.

    A scope that fails, for example a deleted namespace, must not hold back a roll-out that all others need.
    """
    problems = [
        f"namespace {scope} is not served: {why}" if scope else why
        for scope, (state, why) in reports.items()
        if state != "open"
    ]
    states = [state for state, _ in reports.values()]
    return "open" in states and "starting" not in states, "; ".join(problems) or "ok"
