"""What of a job on a cluster is read to explain it, with the rights of the user: two rounds of parallel requests."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, is_true
from ddpjob.api.status import recorded_status
from ddpjob.client.connection import TROUBLES, Connection, Query, RequestError, path_of, request_error
from ddpjob.client.verdict.explain import needed
from ddpjob.client.verdict.facts import Facts
from ddpjob.client.verdict.operator import SELECTOR
from ddpjob.client.verdict.waiting import queue_of
from ddpjob.engine.actions import EngineSettings
from ddpjob.errors import InvalidJobError

_SECONDS = 5.0
"""Time limit of a request; an answer that comes later is left out of the verdict."""
_AT_ONCE = 8
_MANY_NODES = 200
"""Jobs with more nodes are explained from the pods that do not run: a pod takes 20 KB."""
_MOST_PODS = 500
_MOST_PENDING = 1000
_LOG_LINES, _LOG_BYTES = 500, 2**20
_SETTINGS = EngineSettings(gang_scheduler=None, kueue=None)


def read_facts(connection: Connection, job: Json, now: datetime | None) -> Facts:
    """Return the facts about a job. What cannot be read is in ``Facts.unread``.

    now: the time of the API server's response with the job.
    """
    meta = job["metadata"]
    nodes = int(job["spec"].get("numNodes") or 1)
    reader = Reader(connection, str(meta["namespace"]))
    is_finished = is_true(job.get("status"), "Finished")
    attempts = _attempts(job)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddpjob-why") as pool:
        pods = pool.submit(reader.pods, str(meta["uid"]), attempts, nodes)
        queue = queue_of(job)
        pending = pool.submit(reader.pending, queue) if queue else None
        operators = None if is_finished else pool.submit(reader.operators)
        facts = Facts(
            job=job,
            now=now or datetime.now(UTC),
            settings=_SETTINGS,
            pods=pods.result(),
            only_waiting=nodes > _MANY_NODES,
            pending=pending.result() if pending is not None else None,
            operators=operators.result() if operators is not None else None,
            unread=reader.unread,
        )
        more = needed(facts)
        events = [pool.submit(reader.events, *about) for about in more.about]
        claims = {name: pool.submit(reader.claim, name) for name in more.claims}
        logs = {name: pool.submit(reader.log, name) for name in more.logs}
        quotas = pool.submit(reader.quotas) if more.quotas else None
        return replace(
            facts,
            events=[event for found in events for event in found.result()],
            claims={name: cast(Json | None, claim.result()) for name, claim in claims.items() if _is_known(claim)},
            logs={name: text for name, log in logs.items() if (text := log.result())},
            quotas=quotas.result() if quotas is not None else (),
        )


class Reader:
    """Reads objects of one namespace once each. unread: why what could not be read is missing, by its kind."""

    def __init__(self, connection: Connection, namespace: str, seconds: float = _SECONDS) -> None:
        self._connection = connection
        self.namespace = namespace
        self._seconds = min(seconds, connection.timeout)
        self.unread: dict[str, str] = {}

    def pods(self, uid: str, attempts: set[int], nodes: int) -> Sequence[Json] | None:
        selector = f"{names.LABEL_JOB_UID}={uid},{names.LABEL_ATTEMPT} in ({','.join(map(str, attempts))})"
        large = "status.phase!=Running" if nodes > _MANY_NODES else None
        query: Query = {"labelSelector": selector, "limit": _MOST_PODS, "fieldSelector": large}
        return self.items("pods", "pods", names.PODS, self.namespace, query)

    def operators(self) -> Sequence[Json] | None:
        query: Query = {"labelSelector": SELECTOR, "limit": 20}
        return self.items("operator", "the Deployment of the operator", names.DEPLOYMENTS, None, query)

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
        self, kind: str, what: str, resource: Resource, namespace: str | None, query: Query, *, pages: int = 1
    ) -> Sequence[Json] | None:
        """Return the objects of at most so many pages; None if one of them cannot be read."""
        found: list[Json] = []
        token: str | None = ""
        try:
            while token is not None and pages > 0:
                pages -= 1
                asked = {**query, "continue": token or None}
                page = self._connection.once("GET", path_of(resource, namespace), asked, seconds=self._seconds).body
                found += page.get("items") or ()
                token = (page.get("metadata") or {}).get("continue") or None
        except RequestError as error:
            self._note(kind, what, error)
            return None
        return found

    def _note(self, kind: str, what: str, error: RequestError) -> str:
        why = "you may not read this" if error.status == 403 else error.message
        self.unread[kind] = f"{what} could not be read: {why}"
        return self.unread[kind]


def _attempts(job: Json) -> set[int]:
    """Return the attempts whose pods are read: the recorded, the next, and the last that failed."""
    status = recorded_status(job.get("status") or {})
    number = status.attempt or 0
    return {number, number + 1, *(failure.attempt for failure in (status.failures or ())[-1:])}


def _is_known(claim: "Future[Json | str | None]") -> bool:
    return not isinstance(claim.result(), str)
