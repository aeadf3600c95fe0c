"""Reads objects of a job's namespace on a cluster, with the rights of the user.

It imports little: requests are sent at once, and what judges the answers is imported while they are awaited.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Semaphore, Thread
from typing import ParamSpec, TypeVar

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.client.connection import TROUBLES, ApiConnection, Query, RequestError, path_of, request_error
from ddpjob.errors import DDPJobError

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 8  # requests
_SECONDS = 5.0
"""Time limit of a request; an answer that comes later is left out of the verdict."""
MANY_NODES = 200
"""Jobs with more nodes are explained from the pods that do not run: a pod takes 20 KB."""
_MOST_PODS = 500
_LOG_LINES, _LOG_BYTES = 500, 2**20
_OPERATORS: Query = {"labelSelector": names.OPERATOR_SELECTOR, "limit": 20}


class Requests:
    """Sends requests at once. Its threads end with the process: neither an error nor Ctrl-C waits for other answers."""

    def __init__(self) -> None:
        self._free = Semaphore(_AT_ONCE)

    def submit(self, read: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        work = partial(read, *arguments, **options)
        Thread(target=self._run, args=(future, work), name="ddpjob-why", daemon=True).start()
        return future

    def _run(self, future: Future[T], work: Callable[[], T]) -> None:
        with self._free:
            try:
                found = work()
            except BaseException as error:  # ``result`` raises it
                future.set_exception(error)
            else:
                future.set_result(found)


class Reader:
    """Reads objects of one namespace. unread: why what could not be read is missing, by its kind."""

    def __init__(self, connection: ApiConnection, namespace: str, seconds: float = _SECONDS) -> None:
        self._connection = connection
        self.namespace = namespace
        self._seconds = min(seconds, connection.timeout)
        self.unread: dict[str, str] = {}

    def pods(self, job: Json, attempts: set[int]) -> Sequence[Json] | None:
        """Return the pods of some attempts; of a large job those that do not run."""
        wanted = ",".join(sorted(map(str, attempts)))
        selector = f"{names.LABEL_JOB_UID}={job['metadata']['uid']},{names.LABEL_ATTEMPT} in ({wanted})"
        is_large = int(job["spec"].get("numNodes") or 1) > MANY_NODES
        large = "status.phase!=Running" if is_large else None
        query: Query = {"labelSelector": selector, "limit": _MOST_PODS, "fieldSelector": large}
        return self.items("pods", "pods", names.PODS, self.namespace, query)

    def operators(self) -> Sequence[Json] | None:
        return self.items("operator", "the Deployment of the operator", names.DEPLOYMENTS, None, _OPERATORS)

    def events(self, kind: str, name: str) -> Sequence[Json]:
        query: Query = {"fieldSelector": f"involvedObject.kind={kind},involvedObject.name={name}", "limit": 100}
        return self.items("events", "events", names.EVENTS, self.namespace, query) or ()

    def claim(self, name: str) -> Json | str | None:
        """Return the claim; see ``one``."""
        return self.one("claims", "PersistentVolumeClaims", names.CLAIMS, name)

    def one(self, kind: str, what: str, resource: Resource, name: str) -> Json | str | None:
        """Return an object of the namespace; None if it does not exist, and a text if that is not known."""
        try:
            return self._connection.once("GET", path_of(resource, self.namespace, name), seconds=self._seconds).body
        except RequestError as error:
            if error.names(resource.plural):
                return None
            return self._note(kind, what, error)

    def log(self, pod: str) -> str:
        """Return the end of the trainer's log; empty if it cannot be read. A pod that is gone has none."""
        query: Query = {"container": names.TRAINER_CONTAINER, "tailLines": _LOG_LINES, "limitBytes": _LOG_BYTES}
        return self.text("logs", f"the log of {pod}", self.namespace, pod, query)

    def text(self, kind: str, what: str, namespace: str, pod: str, query: Query) -> str:
        """Return a part of a log; empty if it cannot be read, or the pod is gone."""
        path = path_of(names.PODS, namespace, pod, "log")
        try:
            return self._connection.send("GET", path, query, seconds=self._seconds).data.decode(errors="replace")
        except TROUBLES as trouble:
            error = request_error(trouble)
            if not error.names(names.PODS.plural):
                self._note(kind, what, error)
            return ""

    def items(
        self, kind: str, what: str, resource: Resource, namespace: str | None, query: Query
    ) -> Sequence[Json] | None:
        """Return the objects of one page; None if they cannot be read."""
        try:
            page = self._connection.once("GET", path_of(resource, namespace), query, seconds=self._seconds).body
        except RequestError as error:
            self._note(kind, what, error)
            return None
        return page.get("items") or ()

    def tried(self, kind: str, what: str, read: Callable[[ApiConnection, Json], T], job: Json) -> T | None:
        """Return what is read of a job; None if it cannot be read."""
        try:
            return read(self._connection, job)
        except DDPJobError as error:
            if not isinstance(error.__cause__, RequestError):
                raise
            self._note(kind, what, error.__cause__)
            return None

    def _note(self, kind: str, what: str, error: RequestError) -> str:
        why = "you may not read this" if error.status == 403 else error.message
        self.unread[kind] = f"{what} could not be read: {why}"
        return self.unread[kind]
