"""Why the claims of a job that no node fits are not bound: their own events, for the job's status.

The scheduler only says that a pod has unbound claims. The claim's newest event says why, for example that its storage
class does not exist, that nothing provisions it, or that it waits for its first pod.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.engine.claims import unbound_claim
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, NotFound

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 15.0
LONGEST_INTERVAL_SECONDS = 300.0
"""A claim may wait for its first pod, and that for a free node, for days."""
MAX_READERS = 2
"""Jobs whose claims are read at a time. For each LIST of events the API server reads all events of the namespace."""


@dataclass
class _Followed:
    claims: tuple[str, ...]
    task: asyncio.Task[None] = field(init=False)
    text: str = ""


class UnboundClaims:
    """Reads the claims of each followed job in a task of its own, until all are bound.

    on_news: called with the job's key when its text changes.
    """

    def __init__(self, cluster: Cluster, on_news: Callable[[Key], None]) -> None:
        self._cluster = cluster
        self._on_news = on_news
        self._followed: dict[Key, _Followed] = {}
        self._turns = asyncio.Semaphore(MAX_READERS)

    def text(self, key: Key) -> str:
        """Return why claims of a followed job are not bound; empty if they are, or it is not known yet."""
        followed = self._followed.get(key)
        return followed.text if followed is not None else ""

    def follow(self, key: Key, claims: tuple[str, ...]) -> None:
        """Read these claims from now on; without any, stop."""
        known = self._followed.get(key)
        if known is not None and known.claims == claims:
            return
        if known is not None:
            known.task.cancel()
            del self._followed[key]
        if claims:
            followed = self._followed[key] = _Followed(claims)
            followed.task = asyncio.create_task(self._run(key, followed), name=f"claims of {key}")

    def forget(self, key: Key) -> None:
        """Stop reading the claims of a job."""
        self.follow(key, ())

    async def _run(self, key: Key, followed: _Followed) -> None:
        reads = 0
        while True:
            reads += 1
            try:
                async with self._turns:
                    texts = [await self._why(key.namespace, claim) for claim in followed.claims]
            except ClusterError as error:
                logger.debug("cannot read the claims: %s", error)
            else:
                text = "; ".join(filter(None, texts))
                if text != followed.text:
                    followed.text, reads = text, 1
                    self._on_news(key)
                if not text:
                    return  # a bound claim stays bound
            await asyncio.sleep(doubling(INTERVAL_SECONDS, reads, LONGEST_INTERVAL_SECONDS))

    async def _why(self, namespace: str, name: str) -> str:
        """Return why a claim is not bound; empty if it is."""
        try:
            claim = await self._cluster.get(names.CLAIMS, namespace, name)
        except NotFound:
            return unbound_claim(name, None, ())
        events = await self._events(namespace, claim["metadata"]["uid"]) if unbound_claim(name, claim, ()) else ()
        return unbound_claim(name, claim, events)

    async def _events(self, namespace: str, uid: str) -> Sequence[Json]:
        """Return the events of an object; none without the right to list events, which is a new one."""
        try:
            async for page in self._cluster.pages(names.EVENTS, namespace, field_selector=f"involvedObject.uid={uid}"):
                return page.items
        except Forbidden as error:
            logger.debug("cannot read the events of a claim: %s", error)
        return ()
