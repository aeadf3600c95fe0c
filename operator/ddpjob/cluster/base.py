"""Where objects live: the few verbs the operator needs of an API server, and the ways they fail.

Dicts in, dicts out, so that a field newer than this operator passes through untouched. The executors in
``controller`` speak to this protocol alone; ``kubernetes.py`` is the one over HTTP.
"""

from dataclasses import dataclass
from typing import Protocol

from ddpjob.api import wire
from ddpjob.api.names import Resource

Json = wire.Json


class ClusterError(Exception):
    """A call failed. ``str()`` is the server's own message where there was one.

    code: HTTP status, or None when no answer came.
    details: ``details`` of the server's Status object ({} when there was none).
    """

    def __init__(self, message: str, *, code: int | None = None, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or {}


class NotFound(ClusterError):  # noqa: N818 - errors are named like the API server's own reasons
    """404: the object, its namespace or its kind does not exist."""


class AlreadyExists(ClusterError):  # noqa: N818
    """409 on create: an object of that name is there, perhaps from our own request whose answer was lost."""


class Conflict(ClusterError):  # noqa: N818
    """409: the object changed (resourceVersion) or is another one (uid) than the caller believes."""


class Invalid(ClusterError):  # noqa: N818
    """400, 413 or 422: the object itself is wrong; sending it again cannot help."""


class Forbidden(ClusterError):  # noqa: N818
    """403: RBAC, quota, LimitRange, Pod Security or another admission plugin refused."""


class NamespaceTerminating(Forbidden):
    """403 on create because the namespace is being deleted: nothing is left to do there."""


class Unauthorized(ClusterError):  # noqa: N818
    """401 even with fresh credentials."""


class TooManyRequests(ClusterError):  # noqa: N818
    """429 for longer than the client waits by itself. ``retry_after``: seconds the server asked for."""

    def __init__(
        self, message: str, *, retry_after: float = 1.0, code: int | None = None, details: Json | None = None
    ) -> None:
        super().__init__(message, code=code, details=details)
        self.retry_after = retry_after


class Unavailable(ClusterError):  # noqa: N818
    """No usable answer: timeout, connection error or 5xx. A write may or may not have happened."""


@dataclass(frozen=True)
class ObjectList:
    """One consistent LIST: complete objects (with apiVersion and kind) and the version they were read at."""

    items: tuple[Json, ...]
    resource_version: str


class Cluster(Protocol):
    """Asynchronous verbs. Each raises a ``ClusterError`` and has its own time limit."""

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """POST; unknown fields are refused by name (``Invalid``). Returns the object as stored."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """GET one object."""

    async def list(
        self, resource: Resource, namespace: str | None = None, label_selector: str | None = None
    ) -> ObjectList:
        """LIST one namespace, or all of them with None; never served from a stale cache of the server."""

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Json:
        """DELETE with background propagation; ``Conflict`` when the object no longer has this uid.

        Returns the object while it is still terminating, else the server's Status.
        """

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """PATCH with an RFC 7396 merge patch."""

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """The same on the status subresource; ``metadata.resourceVersion`` in the body makes it conditional."""
