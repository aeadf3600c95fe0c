"""The watches of ``Client.cluster``: of one job until it has finished, and of all jobs."""

import math
from collections.abc import Callable, Iterator

from ddpjob.api import names
from ddpjob.api.backoff import Patience
from ddpjob.api.names import DDPJOBS
from ddpjob.api.objects import Json
from ddpjob.client.base import Jobs
from ddpjob.client.connection import (
    CONNECT_SECONDS,
    TROUBLES,
    ApiConnection,
    Query,
    RequestError,
    lines_of,
    parsed,
    path_of,
    pause_after,
    request_error,
)
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, JobNotFoundError

WATCH_SECONDS = 60.0
"""After this time a watch is asked for again, and the jobs are read: a connection may be dead without an error, and an
API server whose data was restored from a backup sends nothing to a watch that began before."""
_WATCH_MARGIN = 10.0
_AGAIN = 1.0  # seconds until the list is read when its history is gone: a proxy may say so each time


def _events(
    connection: ApiConnection, namespace: str | None, query: Query, seconds: float
) -> Iterator[tuple[str, Json]]:
    """Yield kind and object of each event of one stream. Raises one of ``TROUBLES``."""
    whole = max(1, math.ceil(seconds))
    asked = {"watch": True, "allowWatchBookmarks": True, "timeoutSeconds": whole, **query}
    limits = (CONNECT_SECONDS, whole + _WATCH_MARGIN)
    for line in lines_of(connection.send("GET", path_of(DDPJOBS, namespace), asked, seconds=limits)):
        if not line.endswith(b"\n"):  # the connection was cut
            return
        event = parsed(line, 200, {"object"})
        body: Json = event["object"]
        if event["type"] == "ERROR":
            raise RequestError(str(body.get("message")), body.get("code"), body)
        yield event["type"], body


class WatchedJobs:
    """The jobs of a namespace, or of all, as one watch keeps them.

    Args:
        connection: of this watch alone.
        on_trouble: called with the error of a request that is sent again, and with None when the server has answered.
    """

    def __init__(
        self,
        connection: ApiConnection,
        namespace: str | None,
        label_selector: str | None,
        on_trouble: Callable[[DDPJobError | None], None] | None,
    ) -> None:
        self._connection, self._namespace, self._on_trouble = connection, namespace, on_trouble or (lambda _: None)
        self._selected: Query = {"labelSelector": label_selector}
        self._jobs: dict[tuple[str, str], DDPJob] = {}
        self._version = ""  # from which the watch continues; empty to read the list
        self._patience = Patience()

    def lists(self) -> Iterator[Jobs]:
        """Yield the jobs, and again after each change. Raises ``DDPJobError`` after errors that last for long."""
        self._read()
        self._connection.retries = False  # this loop repeats, and says so
        yield self._sorted()
        while True:
            try:
                if not self._version and self._read():
                    yield self._sorted()
                for kind, body in self._streamed():
                    if kind != "BOOKMARK":
                        self._take(kind, body)
                        yield self._sorted()
                self._version = ""
            except (DDPJobError, *TROUBLES) as trouble:
                cause = trouble.__cause__ if isinstance(trouble, DDPJobError) else trouble
                if not isinstance(cause, TROUBLES):  # the client was closed
                    raise
                error = request_error(cause)
                if error.status == 410:
                    self._version = ""
                    self._connection.closed.wait(_AGAIN)
                    continue
                self._on_trouble(self._connection.explained(error))
                self._connection.survive(error, self._patience)

    def _read(self) -> bool:
        """Read the list, and return whether it differs."""
        found, version = self._connection.listed(path_of(DDPJOBS, self._namespace), self._selected)
        before = {key: job.manifest["metadata"]["resourceVersion"] for key, job in self._jobs.items()}
        kept, self._jobs = self._jobs, {}
        for body in found:
            key = _key(body)
            is_same = before.get(key) == body["metadata"]["resourceVersion"]
            self._jobs[key] = kept[key] if is_same else DDPJob.from_manifest(body)
        self._version = version
        self._answered()
        return any(kept.get(key) is not job for key, job in self._jobs.items()) or len(kept) != len(self._jobs)

    def _streamed(self) -> Iterator[tuple[str, Json]]:
        query = {**self._selected, "resourceVersion": self._version}
        for kind, body in _events(self._connection, self._namespace, query, WATCH_SECONDS):
            self._answered()
            self._version = body["metadata"]["resourceVersion"]
            yield kind, body

    def _take(self, kind: str, body: Json) -> None:
        if kind == "DELETED":
            self._jobs.pop(_key(body), None)
        else:
            self._jobs[_key(body)] = DDPJob.from_manifest(body)

    def _sorted(self) -> Jobs:
        return [self._jobs[key] for key in sorted(self._jobs)]

    def _answered(self) -> None:
        self._patience.reset()
        self._on_trouble(None)


def _key(body: Json) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


class JobVersions:
    """The versions of one job, from its watch events, and where these end from the job itself."""

    def __init__(self, connection: ApiConnection, job: DDPJob, key: names.Key) -> None:
        self._first, self._connection, self._key = job, connection, key
        self._version: str = job.manifest["metadata"]["resourceVersion"]
        self._patience = Patience()
        self._is_gone = False

    def after_last(self, seconds: float) -> Iterator[DDPJob]:
        """Yield versions after the last for about this time. Raises ``JobNotFoundError`` after the job was deleted.

        After an error the watch continues behind the last version, so that what happened meanwhile is seen, also the
        end and the deletion of the job. If the server no longer has that version, the job is read.
        """
        try:
            yield from self._events(1.0 if self._is_gone else seconds)
            if self._is_gone:
                raise self._deleted()
            yield self._current()
        except TROUBLES as trouble:
            error = request_error(trouble)
            if error.names(DDPJOBS.plural):
                self._is_gone = True  # but perhaps not before an end that is still in the history
            elif error.status in (410, 504) and self._is_gone:
                raise self._deleted() from None
            elif error.status == 410:
                yield from self._read_again()
            else:
                self._connection.survive(error, self._patience, max(seconds, 0.0))

    def _read_again(self) -> Iterator[DDPJob]:
        try:
            yield self._current()
        except TROUBLES as trouble:
            if request_error(trouble).names(DDPJOBS.plural):
                raise self._deleted() from None
            self._connection.closed.wait(pause_after(request_error(trouble), self._patience) or 1.0)

    def _events(self, seconds: float) -> Iterator[DDPJob]:
        """Yield the job of each event of one stream. Raises one of ``TROUBLES``."""
        namespace, name = self._key
        query: Query = {"fieldSelector": f"metadata.name={name}", "resourceVersion": self._version}
        for kind, body in _events(self._connection, namespace, query, seconds):
            self._patience.reset()
            self._version = body["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            yield self._own(body)
            if kind == "DELETED":
                raise self._deleted()

    def _current(self) -> DDPJob:
        """Return the job as it is now. Raises ``RequestError``."""
        body = self._connection.once("GET", path_of(DDPJOBS, *self._key)).body
        self._patience.reset()
        self._version = body["metadata"]["resourceVersion"]
        return self._own(body)

    def _own(self, body: Json) -> DDPJob:
        job = DDPJob.from_manifest(body)
        if job.uid != self._first.uid:
            raise self._deleted()
        return job

    def _deleted(self) -> JobNotFoundError:
        return JobNotFoundError(
            f"the job {self._first.name} was deleted", "a user deleted it, or its ttlSecondsAfterFinished has passed"
        )
