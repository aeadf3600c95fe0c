"""Send Kubernetes Events about jobs in the background, so that they never delay a reconcile."""

import asyncio
import hashlib
import logging
from datetime import UTC, datetime

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.cluster.base import AlreadyExists, Cluster, ClusterError, NamespaceTerminating
from ddpjob.engine.actions import Note

logger = logging.getLogger(__name__)

COMPONENT = "ddpjob-operator"
MAX_WAITING = 1000
MAX_MESSAGE = 1024  # the limit of events.k8s.io/v1


class EventSender:
    """``send`` queues notes; ``run`` posts them one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting: asyncio.Queue[Json] = asyncio.Queue(MAX_WAITING)

    def send(self, job: Json, note: Note) -> None:
        """Queue ``note`` about ``job``. If 1,000 events wait, it is dropped."""
        try:
            self._waiting.put_nowait(event_body(job, note, datetime.now(UTC)))
        except asyncio.QueueFull:
            logger.warning("too many events wait to be sent; dropped event %s", note.reason)

    async def run(self) -> None:
        """Post queued events until cancelled."""
        while True:
            body = await self._waiting.get()
            await self._post(body)
            self._waiting.task_done()

    async def flush(self) -> None:
        """Wait until every queued event was posted or has failed."""
        await self._waiting.join()

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
