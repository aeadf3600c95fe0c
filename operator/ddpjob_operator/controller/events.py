"""Send Kubernetes Events about jobs in the background, so that they never delay a reconcile.

Namespaces are served in turn, one event of each at a time: a namespace with many events, or one in which the API server
limits events, does not delay the events of another.
"""

import asyncio
import hashlib
import logging
from collections import deque
from contextvars import Context
from datetime import UTC, datetime

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Note
from ddpjob_operator.cluster.base import AlreadyExists, Cluster, ClusterError, NamespaceTerminating

logger = logging.getLogger(__name__)

COMPONENT = "ddpjob-operator"
SENDERS = 4
MAX_WAITING = 1000
"""In one namespace."""
MAX_WAITING_IN_ALL = 10_000
MAX_MESSAGE = 1024  # the limit of events.k8s.io/v1


class EventSender:
    """``send`` queues notes and posts them in a task for each namespace with waiting events; ``close`` drops them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lines: dict[str, deque[Json]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._senders = asyncio.Semaphore(SENDERS)

    def send(self, job: Json, note: Note) -> None:
        """Queue ``note`` about ``job``. If too many events wait, it is dropped."""
        namespace = job["metadata"]["namespace"]
        line = self._lines.setdefault(namespace, deque())
        if len(line) >= MAX_WAITING or sum(map(len, self._lines.values())) >= MAX_WAITING_IN_ALL:
            logger.warning("too many events wait to be sent; dropped event %s", note.reason)
            return
        line.append(event_body(job, note, datetime.now(UTC)))
        if namespace not in self._tasks:
            # In a context of its own, or its log lines would name the job of the first event.
            serving = asyncio.create_task(self._serve(namespace), name="sender of events", context=Context())
            self._tasks[namespace] = serving

    async def flush(self) -> None:
        """Wait until every queued event was posted or has failed."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    def close(self) -> None:
        """Post no more."""
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, namespace: str) -> None:
        """Post the events of a namespace. Of several namespaces, each posts one in turn."""
        try:
            while line := self._lines[namespace]:
                async with self._senders:
                    await self._post(line.popleft())
        finally:
            del self._lines[namespace], self._tasks[namespace]

    async def _post(self, body: Json) -> None:
        try:
            await self._cluster.create(names.EVENTS, body["metadata"]["namespace"], body)
        except (AlreadyExists, NamespaceTerminating):
            pass
        except ClusterError as error:
            logger.warning("cannot post event %s: %s", body["reason"], error)
        except Exception:
            logger.exception("cannot post event %s", body["reason"])


def event_body(job: Json, note: Note, now: datetime) -> Json:
    """Return a core/v1 Event. Its name is a hash of its content, so a retry does not create a second one."""
    meta = job["metadata"]
    attempt = (job.get("status") or {}).get("attempt", 0)
    content = "\0".join((meta["uid"], str(attempt), note.type, note.reason, note.message))
    moment = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{meta['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": meta["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.DDPJOBS.kind,
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
            "resourceVersion": meta.get("resourceVersion", ""),
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:MAX_MESSAGE],
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
        "source": {"component": COMPONENT},
    }
