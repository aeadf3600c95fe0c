"""Watches of DDPJobs: the events of one stream, and all jobs after each change, through lost connections."""

import math
from collections.abc import Callable, Iterator

from ddpjob.api.backoff import Patience
from ddpjob.api.names import DDPJOBS
from ddpjob.api.objects import Json
from ddpjob.client.connection import (
    CONNECT_SECONDS,
    TROUBLES,
    Connection,
    Query,
    RequestError,
    lines_of,
    parsed,
    path_of,
    pause_after,
    request_error,
)
from ddpjob.errors import DDPJobError

WATCH_SECONDS = 60.0
"""After this time a watch is asked for again, and the jobs are read: a connection may be dead without an error, and an
API server whose data was restored from a backup sends nothing to a watch that began before."""
_MARGIN = 10.0
Place = tuple[str, str]
"""Namespace and name."""


def events_after(
    connection: Connection,
    version: str,
    seconds: float,
    *,
    namespace: str | None,
    name: str | None = None,
    selector: str | None = None,
) -> Iterator[Json]:
    """Yield the events after a version for about this time, until the stream ends. Raises one of ``TROUBLES``."""
    whole = max(1, math.ceil(seconds))
    query: Query = {
        "watch": True,
        "fieldSelector": f"metadata.name={name}" if name else None,
        "labelSelector": selector,
        "resourceVersion": version,
        "allowWatchBookmarks": True,
        "timeoutSeconds": whole,
    }
    path = path_of(DDPJOBS, namespace)
    stream = connection.send("GET", path, query, seconds=(CONNECT_SECONDS, whole + _MARGIN))
    for line in lines_of(stream):
        if not line.endswith(b"\n"):  # the connection was cut
            return
        event = parsed(line, 200, {"object"})
        body: Json = event["object"]
        if event["type"] == "ERROR":
            raise RequestError(str(body.get("message")), body.get("code"), body)
        yield event


def all_jobs(
    connection: Connection, namespace: str | None, selector: str | None, read: Callable[[], tuple[list[Json], str]]
) -> Iterator[list[Json]]:
    """Yield all jobs now and after each change, as ``read`` returns them with the version of the list; without end.

    Errors in a row are survived for five minutes; then ``DDPJobError`` is raised.
    """
    patience, shown = Patience(), None
    while True:
        try:
            items, version = read()
            if items != shown:
                yield (shown := items)
            jobs = {_place(item): item for item in items}
            for event in events_after(connection, version, WATCH_SECONDS, namespace=namespace, selector=selector):
                patience.reset()
                if event["type"] != "BOOKMARK":
                    _apply(jobs, event)
                    yield (shown := [jobs[place] for place in sorted(jobs)])
        except TROUBLES as trouble:
            error = request_error(trouble)
            if error.status == 410:
                continue  # the version is too old
            connection.survive(error, patience)
        except DDPJobError as failure:  # of ``read``, after its own tries
            if shown is None or not isinstance(failure.__cause__, RequestError):
                raise
            if pause_after(failure.__cause__, patience) is None:
                raise


def _apply(jobs: dict[Place, Json], event: Json) -> None:
    job = event["object"]
    if event["type"] == "DELETED":
        jobs.pop(_place(job), None)
    else:
        jobs[_place(job)] = job


def _place(job: Json) -> Place:
    return job["metadata"]["namespace"], job["metadata"]["name"]
