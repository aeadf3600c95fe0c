"""Reads objects of a job's namespace on a cluster, with the rights of the user.

It imports little: requests are sent at once, and what judges the answers is imported while they are awaited.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Semaphore, Thread
from typing import NamedTuple, ParamSpec, TypeVar

from urllib3.exceptions import ReadTimeoutError

from ddpjob.api import names
from ddpjob.api.names import DDPJOBS, Resource
from ddpjob.api.objects import Json
from ddpjob.client.connection import TROUBLES, Answer, Connection, Query, RequestError, path_of, request_error
from ddpjob.errors import DDPJobError, InvalidJobError

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 8  # requests
_SECONDS = 5.0
"""Time limit of a request; an answer that comes later is left out of the verdict."""
MANY_NODES = 200
"""Jobs with more nodes are explained from the pods that do not run: a pod takes 20 KB."""
_MOST_PODS = 500
_FEW_PODS = 50
"""Pods that are read before the job is known: of larger jobs too many may be of other attempts, or run."""
_MOST_PENDING = 1000
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


class Asked(NamedTuple):
    """The answers to what is asked at once, by the name of the job alone.

    pods: of jobs of this name, of all attempts. operators: Deployments of operators.
    """

    job: Future[Answer]
    pods: Future[Json]
    operators: Future[Json]


def ask(connection: Connection, requests: Requests, key: names.Key) -> Asked:
    """Send what depends on no other answer. Raises ``InvalidJobError`` for what is not a name."""
    path = path_of(DDPJOBS, *key)
    seconds = min(_SECONDS, connection.timeout)

    def listed(resource: Resource, namespace: str | None, query: Query) -> Json:
        return connection.once("GET", path_of(resource, namespace), query, seconds=seconds).body

    pods: Query = {"labelSelector": f"{names.LABEL_JOB_NAME}={key.name}", "limit": _FEW_PODS}
    return Asked(
        requests.submit(connection.answer, "GET", path),
        requests.submit(listed, names.PODS, key.namespace, pods),
        requests.submit(listed, names.DEPLOYMENTS, None, _OPERATORS),
    )


class Reader:
    """Reads objects of one namespace once each. unread: why what could not be read is missing, by its kind.

    late: the requests of ``ask`` that were not answered when the job was. They are not repeated if they time out.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        seconds: float = _SECONDS,
        late: Collection[Future[Json]] = (),
    ) -> None:
        self._connection = connection
        self.namespace = namespace
        self._late = late
        self._seconds = min(seconds, connection.timeout)
        self.unread: dict[str, str] = {}

    def pods(self, job: Json, attempts: set[int], asked: Future[Json]) -> Sequence[Json] | None:
        """Return the pods of some attempts. asked: the pods of jobs of this name, as they were before."""
        uid, wanted = str(job["metadata"]["uid"]), sorted(map(str, attempts))
        is_large = int(job["spec"].get("numNodes") or 1) > MANY_NODES
        if not is_large and (error := self._timeout_of(asked)) is not None:
            self._note("pods", "pods", error)
            return None
        if not is_large and (listed := _all_listed(asked, job)) is not None:
            labels = [(pod, pod["metadata"].get("labels") or {}) for pod in listed]
            return [
                pod
                for pod, given in labels
                if given.get(names.LABEL_JOB_UID) == uid and given.get(names.LABEL_ATTEMPT) in wanted
            ]
        selector = f"{names.LABEL_JOB_UID}={uid},{names.LABEL_ATTEMPT} in ({','.join(wanted)})"
        large = "status.phase!=Running" if is_large else None
        query: Query = {"labelSelector": selector, "limit": _MOST_PODS, "fieldSelector": large}
        return self.items("pods", "pods", names.PODS, self.namespace, query)

    def operators(self, asked: Future[Json] | None = None) -> Sequence[Json] | None:
        """Return the Deployments of operators. asked: the same request, repeated after an error that may be over."""
        what = "the Deployment of the operator"
        try:
            if asked is not None:
                return asked.result().get("items") or ()
        except RequestError as error:
            if error.status == 403 or error is self._timeout_of(asked):
                self._note("operator", what, error)
                return None
        return self.items("operator", what, names.DEPLOYMENTS, None, _OPERATORS)

    def events(self, kind: str, name: str) -> Sequence[Json]:
        query: Query = {"fieldSelector": f"involvedObject.kind={kind},involvedObject.name={name}", "limit": 100}
        return self.items("events", "events", names.EVENTS, self.namespace, query) or ()

    def pending(self, queue: str) -> Sequence[Json] | None:
        """Return what waits in a LocalQueue, in its order; None if Kueue does not say it, or not to this user."""
        path = path_of(names.VISIBLE_QUEUES, self.namespace, queue, "pendingworkloads")
        try:
            found = self._connection.once("GET", path, {"limit": _MOST_PENDING}, seconds=self._seconds).body
        except (RequestError, InvalidJobError):
            return None
        return list(found.get("items") or ())

    def quotas(self) -> Sequence[Json]:
        return self.items("quotas", "ResourceQuotas", names.QUOTAS, self.namespace, {"limit": 100}) or ()

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

    def tried(self, kind: str, what: str, read: Callable[[Connection, Json], T], job: Json) -> T | None:
        """Return what is read of a job; None if it cannot be read."""
        try:
            return read(self._connection, job)
        except DDPJobError as error:
            if not isinstance(error.__cause__, RequestError):
                raise
            self._note(kind, what, error.__cause__)
            return None

    def _timeout_of(self, asked: Future[Json] | None) -> RequestError | None:
        """Wait for a request of ``ask``. Return its error if it timed out while the server had answered for the job."""
        error = asked.exception() if asked is not None and asked in self._late else None
        return error if isinstance(error, RequestError) and isinstance(error.__cause__, ReadTimeoutError) else None

    def _note(self, kind: str, what: str, error: RequestError) -> str:
        why = "you may not read this" if error.status == 403 else error.message
        self.unread[kind] = f"{what} could not be read: {why}"
        return self.unread[kind]


def _all_listed(asked: Future[Json], job: Json) -> Sequence[Json] | None:
    """Return the objects of a list that is complete and was read after the last change of the job, else None.

    Both versions are numbers of one etcd. If the job is newer, the list may lack pods that its status counts.
    """
    try:
        listed = asked.result()
        meta = listed["metadata"]
        is_older = int(meta["resourceVersion"]) < int(job["metadata"]["resourceVersion"])
    except (RequestError, KeyError, ValueError):
        return None
    return None if is_older or meta.get("continue") else listed.get("items") or ()
