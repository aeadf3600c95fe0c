"""What of a job on a cluster is read to explain it, with the rights of the user: two rounds of parallel requests."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

from kubernetes.client import AppsV1Api, CoreV1Api

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddpjob.api.status import recorded_status
from ddpjob.client.connection import TROUBLES, Connection, Response, read_response, request_error
from ddpjob.client.verdict.explain import needed
from ddpjob.client.verdict.facts import Facts
from ddpjob.client.verdict.operator import SELECTOR
from ddpjob.engine.actions import EngineSettings

_SECONDS = 5.0
"""Time limit of a request; an answer that comes later is left out of the verdict."""
_AT_ONCE = 8
_MANY_NODES = 200
"""Jobs with more nodes are explained from the pods that do not run: a pod takes 20 KB."""
_MOST_PODS = 500
_LOG_LINES, _LOG_BYTES = 500, 2**20
_SETTINGS = EngineSettings()
_NOT_JSON = (ValueError, KeyError)  # of an answer that a proxy gives in place of the API server


def read_facts(connection: Connection, job: Json, now: datetime | None) -> Facts:
    """Return the facts about a job. What cannot be read is in ``Facts.unread``.

    now: the time of the API server's response with the job.
    """
    meta = job["metadata"]
    nodes = int(job["spec"].get("numNodes") or 1)
    reader = _Reader(connection, str(meta["namespace"]))
    is_finished = is_true(job.get("status"), "Finished")
    attempts = _attempts(job)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddpjob-why") as pool:
        pods = pool.submit(reader.pods, str(meta["uid"]), attempts, nodes)
        operators = None if is_finished else pool.submit(reader.operators)
        facts = Facts(
            job=job,
            now=now or datetime.now(UTC),
            settings=_SETTINGS,
            pods=pods.result(),
            only_waiting=nodes > _MANY_NODES,
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


def server_time(response: Response) -> datetime | None:
    """Return the time in a response, by which a wrong clock of this machine does not matter."""
    try:
        return parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError, TypeError):
        return None


class _Reader:
    """Reads objects of one namespace once each. unread: why what could not be read is missing, by its kind."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._core, self._apps = CoreV1Api(connection.api), AppsV1Api(connection.api)
        self.unread: dict[str, str] = {}

    def pods(self, uid: str, attempts: set[int], nodes: int) -> Sequence[Json] | None:
        selector = f"{names.LABEL_JOB_UID}={uid},{names.LABEL_ATTEMPT} in ({','.join(map(str, attempts))})"
        options: dict[str, Any] = {"label_selector": selector, "limit": _MOST_PODS}
        if nodes > _MANY_NODES:
            options["field_selector"] = "status.phase!=Running"
        return self._list("pods", "pods", self._core.list_namespaced_pod, self._namespace, **options)

    def operators(self) -> Sequence[Json] | None:
        listed = self._apps.list_deployment_for_all_namespaces
        return self._list("operator", "the Deployment of the operator", listed, label_selector=SELECTOR, limit=20)

    def events(self, kind: str, name: str) -> Sequence[Json]:
        about = f"involvedObject.kind={kind},involvedObject.name={name}"
        listed = self._core.list_namespaced_event
        return self._list("events", "events", listed, self._namespace, field_selector=about, limit=100) or ()

    def quotas(self) -> Sequence[Json]:
        listed = self._core.list_namespaced_resource_quota
        return self._list("quotas", "ResourceQuotas", listed, self._namespace, limit=100) or ()

    def claim(self, name: str) -> Json | str | None:
        """Return the claim; None if it does not exist, and a text if that is not known."""
        try:
            read = self._core.read_namespaced_persistent_volume_claim
            return cast(Json, json.loads(self._bytes(read, name, self._namespace)))
        except (*TROUBLES, *_NOT_JSON) as trouble:
            if request_error(trouble).names(names.CLAIMS.plural):
                return None
            return self._note("claims", "PersistentVolumeClaims", trouble)

    def log(self, pod: str) -> str:
        """Return the end of the trainer's log; empty if it cannot be read. A pod that is gone has none."""
        try:
            return self._bytes(
                self._core.read_namespaced_pod_log,
                pod,
                self._namespace,
                container=names.TRAINER_CONTAINER,
                tail_lines=_LOG_LINES,
                limit_bytes=_LOG_BYTES,
            ).decode(errors="replace")
        except TROUBLES as trouble:
            if not request_error(trouble).names(names.PODS.plural):
                self._note("logs", f"the log of {pod}", trouble)
            return ""

    def _list(
        self, kind: str, what: str, call: Callable[..., Any], *arguments: Any, **options: Any
    ) -> list[Json] | None:
        try:
            return cast(list[Json], json.loads(self._bytes(call, *arguments, **options))["items"])
        except (*TROUBLES, *_NOT_JSON) as trouble:
            self._note(kind, what, trouble)
            return None

    def _bytes(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> bytes:
        seconds = min(_SECONDS, self._connection.timeout)
        return read_response(call, *arguments, _request_timeout=seconds, **options).data

    def _note(self, kind: str, what: str, trouble: BaseException) -> str:
        error = request_error(trouble)
        why = "you may not read this" if error.status == 403 else error.message
        if isinstance(trouble, _NOT_JSON):
            why = "the answer is not from an API server"
        self.unread[kind] = f"{what} could not be read: {why}"
        return self.unread[kind]


def _attempts(job: Json) -> set[int]:
    """Return the attempts whose pods are read: the recorded, the next, and the last that failed."""
    status = recorded_status(job.get("status") or {})
    number = status.attempt or 0
    return {number, number + 1, *(failure.attempt for failure in (status.failures or ())[-1:])}


def _is_known(claim: "Future[Json | str | None]") -> bool:
    return not isinstance(claim.result(), str)
