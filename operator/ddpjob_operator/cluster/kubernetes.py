"""The ``Cluster`` over HTTP: requests with dicts, responses as dicts or typed errors.

Of the official client only configuration and credentials are used: its dynamic client doubles the CPU time of a
request, and its typed models refuse pod fields that they do not know.
"""

import asyncio
import contextlib
import json
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, cast

import aiohttp
import msgspec
import yarl

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster import job_json
from ddpjob_operator.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    NotServed,
    Page,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from ddpjob_operator.cluster.clock import ServerClock
from ddpjob_operator.cluster.connection import ConfigurationError, Connection

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
METHODS: Final = {"create": "POST", "get": "GET", "list": "GET", "delete": "DELETE", "patch": "PATCH"}
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._:-]*(/[a-z]+)?")
"""Of an object, perhaps with a subresource."""
STRICT: Final[dict[str, str]] = {"fieldValidation": "Strict"}
PAGE_SIZE: Final = 500
JOBS_PAGE_SIZE: Final = 16
"""A tenant's job may take 1.5 MB."""
MAX_PAGE_BYTES: Final = 8 * 2**20
"""A larger page is requested again with fewer objects. Decoded, a page of small values takes 13 times its bytes."""
CONNECT_SECONDS: Final = 5.0

# Retries of one request end after this time. The work queue's backoff follows.
RETRY_SECONDS: Final = 5.0
RETRY_DELAYS: Final = (0.1, 0.3, 1.0, 2.0)
MAX_TEXT: Final = 500  # of a response that is not a Status object, for example a proxy's error page

Observer = Callable[[str, str, str, float], None]
"""Called after every request with verb, kind, HTTP status (or "error") and duration in seconds."""


class KubernetesCluster:
    """The verbs of ``Cluster`` on a real API server.

    Every verb may be sent twice: creates have deterministic names (a lost response becomes ``AlreadyExists``), deletes
    a uid precondition, status patches a resourceVersion. So all verbs are retried on 429 (after Retry-After), 5xx,
    timeouts and connection errors, for at most ``RETRY_SECONDS``.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        max_connections: int = 64,
        timeout: float = 10.0,
        observer: Observer = lambda *request: None,
    ) -> None:
        self._connection = connection
        self._max_connections = max_connections
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        self._observe = observer
        self._session = connection.session(max_connections)
        self._generation = connection.generation
        self.clock = ServerClock()
        """The server's clock, from the responses to all requests."""

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._session.close()

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        return await self._request("create", resource, namespace, params=_validation(resource), body=body)

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return await self._request("get", resource, namespace, name)

    async def read_log(self, namespace: str, pod: str, container: str, *, lines: int, limit: int) -> str:
        params = {"container": container, "tailLines": str(lines), "limitBytes": str(limit)}
        body = await self._send("get", names.PODS, namespace, f"{pod}/log", params=params)
        return body.decode(errors="replace")

    async def pages(
        self, resource: Resource, namespace: str | None = None, label_selector: str | None = None
    ) -> AsyncIterator[Page]:
        selected = {"labelSelector": label_selector} if label_selector else {}
        limit = JOBS_PAGE_SIZE if resource is names.DDPJOBS else PAGE_SIZE
        params, version = selected | {"limit": str(limit)}, ""
        is_first = True
        while True:
            try:
                page = await self._request("list", resource, namespace, params=params)
            except _PageTooLargeError:
                limit = max(1, limit // 8)
                params |= {"limit": str(limit)}
                continue
            except ClusterError as error:
                if error.code != 410 or "limit" not in params:
                    raise
                # The continue token is older than the server's history. Read everything in one page.
                params, is_first = selected, True
                continue
            metadata = page.get("metadata") or {}
            version = str(metadata.get("resourceVersion", "")) if is_first else version
            # Items of a list have no kind and no apiVersion; callers need complete objects.
            kind = {"apiVersion": resource.api_version, "kind": resource.kind}
            items = tuple(kind | item for item in page.get("items") or ())
            del page  # while the caller has one page and the next one arrives, no third one is in memory
            yield Page(items, version, is_first)
            del items
            if not metadata.get("continue"):
                return
            params, is_first = params | {"continue": metadata["continue"]}, False

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
        return await self._request("patch", resource, namespace, name, params=_validation(resource), body=body)

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        return await self.patch(resource, namespace, f"{name}/status", body)

    async def _request(self, verb: str, resource: Resource, *args: str | None, **sent: Any) -> Json:
        """Return the object or list of a response, without large specs (``job_json``). args, sent: of ``_send``."""
        answer = await self._send(verb, resource, *args, **sent)
        slim = None
        if resource is names.DDPJOBS:
            slim = job_json.read_list(answer) if verb == "list" else job_json.read_job(answer)
        return decode(answer) if slim is None else slim

    async def _send(
        self,
        verb: str,
        resource: Resource,
        namespace: str | None,
        name: str | None = None,
        *,
        params: dict[str, str] | None = None,
        body: Json | None = None,
    ) -> bytes:
        if name is not None and not _NAME.fullmatch(name):
            # Without a name the URL is that of the collection: a DELETE would delete every object.
            # A name with ".." makes it the URL of another object.
            raise Invalid(f"{verb} of a {resource.kind}: {name!r} is no name")
        path = f"{self._connection.server}/{resource.path(namespace)}" + (f"/{name}" if name else "")
        url = yarl.URL(path).with_query(params)
        data = None if body is None else encode(body)
        clock = asyncio.get_running_loop().time
        deadline = clock() + RETRY_SECONDS
        renewed = False
        delays = iter(RETRY_DELAYS)
        while True:
            session_generation = self._generation
            try:
                return await self._once(verb, resource, url, data)
            except Unauthorized:
                if renewed:
                    raise
                renewed = True
                await self._renew(session_generation)
                continue
            except (TooManyRequests, Unavailable, Conflict) as error:
                # A create gets Conflict only if updates of the quota's usage collide.
                if isinstance(error, Conflict) and verb != "create":
                    raise
                delay = _pause(error, next(delays, None))
                if delay is None or clock() + delay > deadline:
                    raise
            await asyncio.sleep(delay)

    async def _once(self, verb: str, resource: Resource, url: yarl.URL, data: bytes | None) -> bytes:
        kind = resource.kind
        headers = {"Content-Type": MERGE_PATCH if verb == "patch" else JSON} if data else None
        clock = asyncio.get_running_loop().time
        started, sent = clock(), self.clock.monotonic()
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
                if response.ok:  # an error may come from a proxy in front of the server
                    self.clock.observe(response.headers.get("Date"), sent, self.clock.monotonic())
                code = str(response.status)
                body = await (_read_page(response) if url.query.get("limit", "1") != "1" else response.read())
        except TimeoutError as error:
            raise Unavailable(f"{verb} {kind}: no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise Unavailable(f"{verb} {kind}: {type(error).__name__}: {error}") from error
        finally:
            self._observe(verb, kind, code, clock() - started)
        if response.status >= 300:
            raise error_of(response.status, response.headers, body)
        return body

    async def _renew(self, seen_generation: int) -> None:
        """Read credentials and CA again after a 401, and replace the session."""
        try:
            await self._connection.renew(seen_generation)
        except ConfigurationError as error:
            raise Unauthorized(f"the API server refused the credentials, and {error}", code=401) from error
        if self._generation != self._connection.generation:
            self._generation = self._connection.generation
            old, self._session = self._session, self._connection.session(self._max_connections)
            # Requests on the old session end within their time limit.
            asyncio.get_running_loop().call_later(
                (self._timeout.total or 0) + 1, lambda: asyncio.ensure_future(old.close())
            )


class _PageTooLargeError(Exception):
    """A page of a LIST has more than ``MAX_PAGE_BYTES``."""


async def _read_page(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response. Raises ``_PageTooLargeError`` before more of it than that is in memory."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_PAGE_BYTES:
            raise _PageTooLargeError
    return b"".join(chunks)


def _pause(error: ClusterError, delay: float | None) -> float | None:
    """Return the seconds until the next try, or None if there is no next try."""
    if delay is None:
        return None
    if isinstance(error, TooManyRequests):
        # Never less than the server requires. The random part spreads concurrent requests.
        return error.retry_after + random.uniform(0, delay)  # noqa: S311
    return delay * random.uniform(0.5, 1.5)  # noqa: S311


def encode(body: Json) -> bytes:
    """Return an object as JSON. An API server also accepts the text that msgspec refuses: lone surrogates."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, allow_nan=False).encode()


def decode(body: bytes) -> Json:
    """Return the JSON object of a successful response. Raises ``Unavailable`` if it is anything else."""
    try:
        value = _loads(body)
    except ValueError as error:
        raise Unavailable(f"the server's response is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unavailable("the server's response is not a JSON object")
    return value


def _loads(body: bytes) -> Any:
    """Return the value that ``json.loads`` returns, in less time. Raises ``ValueError``."""
    with contextlib.suppress(msgspec.DecodeError, ValueError):  # lone surrogates, and numbers beyond those of a float
        return msgspec.json.decode(body)
    return json.loads(body)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ClusterError:
    """Return the typed error for a response with status 300 or above, with the server's message."""
    response = _status_object(body)
    message = str(response.get("message") or f"HTTP {status}")
    details = response.get("details") or {}
    reason = response.get("reason", "")
    retry_after = _retry_after(headers, details) if status == 429 else 0.0
    return _class_of(status, reason, details)(message, code=status, details=details, retry_after=retry_after)


def _validation(resource: Resource) -> dict[str, str] | None:
    """Return the parameter with which unknown fields are refused.

    A Workload may have fields of pods that the definition of Workloads in Kueue does not know yet, nor needs.
    """
    return None if resource is names.WORKLOADS else STRICT


def _class_of(status: int, reason: str, details: Json) -> type[ClusterError]:
    if status == 403 and any(c.get("reason") == "NamespaceTerminating" for c in details.get("causes") or ()):
        return NamespaceTerminating
    if status == 404 and not details.get("name"):
        return NotServed
    if status == 409:
        return AlreadyExists if reason == "AlreadyExists" else Conflict
    if status >= 500:
        return Unavailable
    return _CLASSES.get(status, ClusterError)


_CLASSES: Final[Mapping[int, type[ClusterError]]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: Invalid,
    413: Invalid,
    422: Invalid,
    429: TooManyRequests,
}


def _status_object(body: bytes) -> Json:
    try:
        response = _loads(body)
    except ValueError:
        response = None
    if isinstance(response, dict) and response.get("kind") == "Status":
        return cast(Json, response)
    text = body.decode(errors="replace").strip()
    return {"message": text[:MAX_TEXT]} if text else {}


def _retry_after(headers: Mapping[str, str], details: Json) -> float:
    """Return the seconds to wait, from the header or else from the Status; 1 without them, or if they are no number."""
    value: Any = headers.get("Retry-After") or details.get("retryAfterSeconds") or 1
    try:
        return max(0.0, float(value))
    except ValueError:
        return 1.0
