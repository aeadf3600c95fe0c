"""What of a job on a cluster is read to explain it, with the rights of the user: two rounds of parallel requests."""

from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

from ddpjob.api.objects import Json, is_true
from ddpjob.api.status import recorded_status
from ddpjob.client.cluster_reader import MANY_NODES, Asked, Reader, Requests
from ddpjob.client.connection import Connection
from ddpjob.client.verdict.explain import needed
from ddpjob.client.verdict.facts import Facts
from ddpjob.client.verdict.refused import queue_of
from ddpjob.engine.actions import EngineSettings

_SETTINGS = EngineSettings(gang_scheduler=None, kueue=None)


def read_facts(connection: Connection, requests: Requests, asked: Asked) -> Facts:
    """Return the facts about a job. What cannot be read is in ``Facts.unread``.

    asked: the first round of requests, of ``ask``. requests: sends the second.

    Raises:
        DDPJobError: the job cannot be read.
    """
    job, now = asked.job.result()
    late = [each for each in (asked.pods, asked.operators) if not each.done()]
    reader = Reader(connection, str(job["metadata"]["namespace"]), late=late)
    is_finished = is_true(job.get("status"), "Finished")
    pods = requests.submit(reader.pods, job, _attempts(job), asked.pods)
    queue = queue_of(job)
    pending = requests.submit(reader.pending, queue) if queue else None
    operators = None if is_finished else requests.submit(reader.operators, asked.operators)
    facts = Facts(
        job=job,
        now=now or datetime.now(UTC),
        settings=_SETTINGS,
        pods=pods.result(),
        only_waiting=int(job["spec"].get("numNodes") or 1) > MANY_NODES,
        pending=pending.result() if pending is not None else None,
        operators=operators.result() if operators is not None else None,
        unread=reader.unread,
    )
    more = needed(facts)
    events = [requests.submit(reader.events, *about) for about in more.about]
    claims = {name: requests.submit(reader.claim, name) for name in more.claims}
    logs = {name: requests.submit(reader.log, name) for name in more.logs}
    quotas = requests.submit(reader.quotas) if more.quotas else None
    return replace(
        facts,
        events=[event for found in events for event in found.result()],
        claims={name: cast(Json | None, claim.result()) for name, claim in claims.items() if _is_known(claim)},
        logs={name: text for name, log in logs.items() if (text := log.result())},
        quotas=quotas.result() if quotas is not None else (),
    )


def _attempts(job: Json) -> set[int]:
    """Return the attempts whose pods are read: the recorded, the next, and the last that failed."""
    status = recorded_status(job.get("status") or {})
    number = status.attempt or 0
    return {number, number + 1, *(failure.attempt for failure in (status.failures or ())[-1:])}


def _is_known(claim: "Future[Json | str | None]") -> bool:
    return not isinstance(claim.result(), str)
