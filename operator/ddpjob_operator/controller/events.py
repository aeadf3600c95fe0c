"""Send Kubernetes Events about jobs in the background, so that they never delay a reconcile.

Namespaces are served in turn, one event of each at a time: a namespace with many events, or one in which the API server
limits events, does not delay the events of another.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
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
    """``send`` queues notes; ``run`` posts them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lines: OrderedDict[str, deque[Json]] = OrderedDict()
        self._busy: set[str] = set()
        self._unsent = 0
        self._may_send, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_empty.set()

    def send(self, job: Json, note: Note) -> None:
        """Queue ``note`` about ``job``. If too many events wait, it is dropped."""
        namespace = job["metadata"]["namespace"]
        if len(self._lines.get(namespace, ())) >= MAX_WAITING or self._unsent >= MAX_WAITING_IN_ALL:
            logger.warning("too many events wait to be sent; dropped event %s", note.reason)
            return
        self._lines.setdefault(namespace, deque()).append(event_body(job, note, datetime.now(UTC)))
        self._unsent += 1
        self._is_empty.clear()
        self._may_send.set()

    async def run(self) -> None:
        """Post queued events until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send_in_turn(), name="sender of events")

    async def flush(self) -> None:
        """Wait until every queued event was posted or has failed."""
        await self._is_empty.wait()

    async def _send_in_turn(self) -> None:
        while True:
            namespace = next((name for name in self._lines if name not in self._busy), None)
            if namespace is None:
                self._may_send.clear()
                await self._may_send.wait()
                continue
            self._busy.add(namespace)
            await self._post(self._next(namespace))
            self._busy.discard(namespace)
            self._unsent -= 1
            self._may_send.set()
            if not self._unsent:
                self._is_empty.set()

    def _next(self, namespace: str) -> Json:
        """Take the first event of a namespace, which is then the last in turn."""
        line = self._lines.pop(namespace)
        body = line.popleft()
        if line:
            self._lines[namespace] = line
        return body

    async def _post(self, body: Json) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        try:
            await self._cluster.create(names.EVENTS, namespace, body)
        except AlreadyExists:
            await self._repeat(namespace, name, body)
        except NamespaceTerminating:
            pass
        except ClusterError as error:
            logger.warning("cannot post event %s: %s", body["reason"], error)

    async def _repeat(self, namespace: str, name: str, body: Json) -> None:
        """Update the time of an event that was posted before."""
        try:
            await self._cluster.patch(names.EVENTS, namespace, name, {"lastTimestamp": body["lastTimestamp"]})
        except ClusterError as error:
            logger.debug("cannot update event %s: %s", name, error)


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
