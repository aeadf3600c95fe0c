"""The ``Cluster`` over HTTP: thin requests with dicts, on connections opened by ``connection.py``.

The official client's dynamic layer doubles the CPU time of a request, and its typed models refuse pod
fields that they do not know; so its configuration and credentials are used, and nothing else of it.
"""

import asyncio
import json
import random
import ssl
from collections.abc import Callable
from typing import Final

import aiohttp
import yarl
from kubernetes.aio.config import ConfigException

from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster import responses
from ddpjob.cluster.base import (
    ClusterError,
    Conflict,
    Invalid,
    ObjectList,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from ddpjob.cluster.connection import ConfigurationError, Connection

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
METHODS: Final = {"create": "POST", "get": "GET", "list": "GET", "delete": "DELETE", "patch": "PATCH"}
PAGE_SIZE: Final = 500

# A request is tried again for at most this long; after that the work queue's backoff takes over.
RETRY_SECONDS: Final = 5.0
RETRY_DELAYS: Final = (0.1, 0.3, 1.0, 2.0)

Observer = Callable[[str, str, str, float], None]
"""Called after every request with verb, kind, HTTP status (or "error") and duration in seconds."""


class KubernetesCluster:
    """Verbs of ``Cluster`` against a real API server.

    Every verb may be sent twice: creates have deterministic names (a lost answer becomes ``AlreadyExists``),
    deletes a uid precondition, status patches a resourceVersion. So all are retried alike on 429 (obeying
    Retry-After), 5xx, timeouts and connection errors, for ``RETRY_SECONDS`` at most.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        max_connections: int = 64,
        timeout: float = 10.0,
        connect_timeout: float = 5.0,
        observer: Observer | None = None,
    ) -> None:
        self._connection = connection
        self._max_connections = max_connections
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=connect_timeout)
        self._observer = observer
        self._session = connection.session(max_connections)
        self._generation = connection.generation

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._session.close()

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        params = {"fieldValidation": "Strict"}
        return await self._request("create", resource, namespace, params=params, body=body)

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return await self._request("get", resource, namespace, name)

    async def list(
        self, resource: Resource, namespace: str | None = None, label_selector: str | None = None
    ) -> ObjectList:
        params = {"limit": str(PAGE_SIZE)}
        if label_selector:
            params["labelSelector"] = label_selector
        items: list[Json] = []
        while True:
            try:
                page = await self._request("list", resource, namespace, params=params)
            except ClusterError as error:
                if error.code != 410 or "limit" not in params:
                    raise
                # The continue token outlived the server's history: read all at once instead.
                items = []
                params = {key: value for key, value in params.items() if key == "labelSelector"}
                continue
            # Items of a list carry neither; everything downstream wants complete objects.
            kind = {"apiVersion": resource.api_version, "kind": resource.kind}
            items += [{**kind, **item} for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return ObjectList(tuple(items), str(metadata.get("resourceVersion", "")))
            params["continue"] = metadata["continue"]

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Json:
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._request("delete", resource, namespace, name, body=body)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        params = {"fieldValidation": "Strict"}
        return await self._request("patch", resource, namespace, name, params=params, body=body)

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        params = {"fieldValidation": "Strict"}
        path = f"{name}/status"
        return await self._request("patch", resource, namespace, path, params=params, body=body)

    async def _request(
        self,
        verb: str,
        resource: Resource,
        namespace: str | None,
        name: str | None = None,
        *,
        params: dict[str, str] | None = None,
        body: Json | None = None,
    ) -> Json:
        if name is not None and not name.partition("/")[0]:
            # Without a name the path is that of the whole collection, and a DELETE would empty it.
            raise Invalid(f"{verb} of a {resource.kind} without a name")
        url = self._url(resource, namespace, name, params)
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        clock = asyncio.get_running_loop().time
        deadline = clock() + RETRY_SECONDS
        renewed = False
        delays = iter(RETRY_DELAYS)
        while True:
            session_generation = self._generation
            try:
                return await self._once(verb, resource.kind, url, data)
            except Unauthorized:
                if renewed:
                    raise
                renewed = True
                await self._renew(session_generation)
                continue
            except (TooManyRequests, Unavailable, Conflict) as error:
                # A create meets Conflict only when quota bookkeeping raced with another create.
                if isinstance(error, Conflict) and verb != "create":
                    raise
                delay = _pause(error, next(delays, None))
                if delay is None or clock() + delay > deadline:
                    raise
            await asyncio.sleep(delay)

    async def _once(self, verb: str, kind: str, url: yarl.URL, data: bytes | None) -> Json:
        headers = {"Content-Type": MERGE_PATCH if verb == "patch" else JSON} if data else None
        clock = asyncio.get_running_loop().time
        started = clock()
        code = "error"
        try:
            async with self._session.request(
                METHODS[verb],
                url,
                data=data,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
                server_hostname=self._connection.tls_server_name,
            ) as response:
                body = await response.read()
                code = str(response.status)
        except TimeoutError as error:
            raise Unavailable(f"{verb} {kind}: no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, ssl.SSLError, OSError, ConfigException) as error:
            raise Unavailable(f"{verb} {kind}: {type(error).__name__}: {error}") from error
        finally:
            if self._observer is not None:
                self._observer(verb, kind, code, clock() - started)
        if response.status >= 300:
            raise responses.error_of(response.status, response.headers, body)
        return responses.decode(body)

    async def _renew(self, seen_generation: int) -> None:
        """Reload credentials and trust after a 401, and put a new session in place of the old one."""
        try:
            await self._connection.renew(seen_generation)
        except ConfigurationError as error:
            raise Unauthorized(f"the API server refused the credentials, and {error}", code=401) from error
        if self._generation != self._connection.generation:
            self._generation = self._connection.generation
            old, self._session = self._session, self._connection.session(self._max_connections)
            # Requests still under way on the old one end within their own time limit.
            asyncio.get_running_loop().call_later(
                (self._timeout.total or 0) + 1, lambda: asyncio.ensure_future(old.close())
            )

    def _url(
        self, resource: Resource, namespace: str | None, name: str | None, params: dict[str, str] | None
    ) -> yarl.URL:
        parts = [self._connection.server, resource.path_prefix]
        parts += ["namespaces", namespace] if namespace else []
        parts += [resource.plural, name] if name else [resource.plural]
        return yarl.URL("/".join(parts)).with_query(params)


def _pause(error: ClusterError, delay: float | None) -> float | None:
    """Seconds until the next try, or None to give up."""
    if delay is None:
        return None
    if isinstance(error, TooManyRequests):
        # Above what was asked for, never below; the spread keeps concurrent requests from returning as one.
        return error.retry_after + random.uniform(0, delay)  # noqa: S311
    return delay * random.uniform(0.5, 1.5)  # noqa: S311
