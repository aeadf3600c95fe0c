"""Watch pods, Services and NetworkPolicies of jobs: a LIST, then a watch that continues where the one before ended.

kopf watches the jobs (``job_watch``). It is too slow for pods: a thousand pods cause four thousand events in seconds,
and kopf starts a task for each pod and makes a logger, a copy and the arguments of a handler for each event.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import aiohttp
import yarl

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Cluster, ClusterError, TooManyRequests, Unavailable
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import CONNECT_SECONDS, decode, error_of
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import list_into
from ddpjob_operator.controller.watch_status import FIRST_RESTART_SECONDS, WatchStatus

logger = logging.getLogger(__name__)

SERVER_SECONDS = 300  # the server then ends the watch
SILENT_SECONDS = 70.0  # the API server sends a bookmark every minute
SLICE = 16
"""Events that are taken before other tasks run, so that a burst does not block the event loop."""


@dataclass(kw_only=True)
class ObjectWatch:
    """Keeps the objects of one kind and scope up to date in the cache; ``run`` never ends by itself.

    scope: the namespace, or None for all. status: names the kind.
    silent_seconds: a watch that has received no data for so long is opened again.
    """

    cluster: Cluster
    connection: Connection
    cache: Cache
    scope: str | None
    status: WatchStatus
    silent_seconds: float = SILENT_SECONDS
    _version: str = field(default="", init=False)

    async def run(self) -> None:
        """List and watch until cancelled; after an error again, with growing delay."""
        await self.status.keep_open(self._until_error)

    async def _until_error(self) -> float:
        """Watch until an error; return for how many seconds the API server wants no further request."""
        try:
            async with self.connection.session(0, middlewares=(self.status.middleware,)) as session:
                while True:
                    await self._follow(session)
                    await asyncio.sleep(FIRST_RESTART_SECONDS)
        except ClusterError as error:
            if error.code == 410:  # the server no longer has the history since the last seen version
                logger.debug("the watch of %s expired, listing them again", self.status.path)
            elif not self._version or not self.status.is_failing:
                # An error of the LIST, or of an event: the session of the watch has not noted it.
                self.status.fail(f"{type(error).__name__}: {error}")
            if not isinstance(error, Unavailable | TooManyRequests):
                self._version = ""  # the LIST also reads the credentials again, if they were refused
            return error.retry_after
        except (aiohttp.ClientError, ssl.SSLError, OSError) as error:  # among them every timeout
            logger.info("the watch of %s was interrupted: %s: %s", self.status.path, type(error).__name__, error)
        return 0.0

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Watch from the last seen version, or from a new LIST, until the server ends the watch."""
        if not self._version:
            _, self._version = await list_into(self.cache, self.cluster, self.status.resource, self.scope)
        taken = 0
        async with contextlib.aclosing(self._events(session)) as events:
            async for event in events:
                self._take(event)
                taken += 1
                if taken % SLICE == 0:
                    await asyncio.sleep(0)

    async def _events(self, session: aiohttp.ClientSession) -> AsyncGenerator[Json, None]:
        resource = self.status.resource
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "labelSelector": names.SELECTORS.get(resource, ""),
            "resourceVersion": self._version,
            "timeoutSeconds": str(SERVER_SECONDS),
        }
        async with session.get(
            yarl.URL(f"{self.connection.server}/{resource.path(self.scope)}").with_query(query),
            timeout=aiohttp.ClientTimeout(
                total=SERVER_SECONDS + 10, sock_connect=CONNECT_SECONDS, sock_read=self.silent_seconds
            ),
            allow_redirects=False,
            server_hostname=self.connection.tls_server_name,
        ) as response:
            if response.status != 200:
                raise error_of(response.status, response.headers, await response.read())
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield decode(line)

    def _take(self, event: Json) -> None:
        kind, obj = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            code = int(obj.get("code") or 500)
            raise ClusterError(str(obj.get("message") or f"HTTP {code}"), code=code)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self.cache.take(self.status.resource, event)
        self._version = (obj.get("metadata") or {}).get("resourceVersion") or self._version
