"""The interface to an API server: the verbs that the operator needs, and the errors they raise.

Objects are dicts, so that fields newer than this operator pass through unchanged. ``controller`` uses only this
protocol; ``kubernetes.py`` implements it over HTTP, ``memory`` in the process.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json

MAX_RETRY_AFTER = 60.0
"""A proxy or a webhook may ask for a day: a job would wait as long, and a watch would see no pod end."""


class ClusterError(Exception):
    """A call failed. ``str()`` is the server's message if it sent one.

    code: HTTP status, or None without a response.
    details: ``details`` of the server's Status object, or {}.
    retry_after: seconds that the server wants clients to wait, at most ``MAX_RETRY_AFTER``.
    """

    def __init__(
        self, message: str, *, code: int | None = None, details: Json | None = None, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or {}
        self.retry_after = min(retry_after, MAX_RETRY_AFTER)


class NotFound(ClusterError):  # noqa: N818 - errors are named like the API server's own reasons
    """404: the API server says that the object or its namespace does not exist."""


class NotServed(ClusterError):  # noqa: N818
    """404 that names no object: the kind is not installed, or a proxy in front of the API server answered.

    It says nothing about an object.
    """


class AlreadyExists(ClusterError):  # noqa: N818
    """409 on create: an object of this name exists, perhaps from our own request whose response was lost."""


class Conflict(ClusterError):  # noqa: N818
    """409: the object's resourceVersion or uid is not the one in the request."""


class Invalid(ClusterError):  # noqa: N818
    """400, 413 or 422: the object is wrong; 405: the definition of its kind is being deleted. It will fail again."""


class Forbidden(ClusterError):  # noqa: N818
    """403: RBAC, quota, LimitRange, Pod Security or another admission plugin refused the request."""


class NamespaceTerminating(Forbidden):
    """403 on create: the namespace is being deleted."""


class Unauthorized(ClusterError):  # noqa: N818
    """401, also with renewed credentials."""


class TooManyRequests(ClusterError):  # noqa: N818
    """429 for longer than the client retries."""


class Unavailable(ClusterError):  # noqa: N818
    """No usable response: timeout, connection error or 5xx. A write may or may not have happened."""


@dataclass(frozen=True)
class Page:
    """A part of a LIST: complete objects, with apiVersion and kind. All pages are consistent at one version.

    resource_version: of the whole LIST.
    is_first: the LIST begins, or began again because the server no longer had its version; forget earlier pages.
    """

    items: tuple[Json, ...]
    resource_version: str
    is_first: bool = True


class Cluster(Protocol):
    """Asynchronous verbs. Each raises ``ClusterError`` and has its own time limit."""

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Create an object (POST) and return it as stored. Raises ``Invalid`` for an unknown field."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Return one object."""

    async def read_log(self, namespace: str, pod: str, container: str, *, lines: int, limit: int) -> str:
        """Return the last lines of a container's log, without what follows the first ``limit`` bytes of them."""

    def pages(
        self, resource: Resource, namespace: str | None = None, label_selector: str | None = None
    ) -> AsyncIterator[Page]:
        """Yield the objects of a namespace, or of all if None. The server's cache, which may be stale, is not used."""

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Json:
        """Delete an object, with background propagation. Raises ``Conflict`` if the object has another uid.

        Return the object if it is still terminating, else the server's Status.
        """

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """Apply an RFC 7396 merge patch and return the object."""

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """Patch the status subresource. ``metadata.resourceVersion`` in the body makes the patch conditional."""
