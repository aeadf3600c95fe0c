"""Whether a job has a Workload of Kueue, asked again before an attempt depends on it."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob_operator.cluster.base import Cluster, ClusterError
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import read_into

logger = logging.getLogger(__name__)

MAX_GAP_SECONDS = 2 * LOOKUP_SECONDS
"""Answers with a longer gap between them are not in a row: nothing was asked meanwhile."""


@dataclass
class Absence:
    """The GETs in a row that showed no Workload of a job: monotonic times of the first and the last."""

    first: float = -math.inf
    last: float = -math.inf

    def lasts(self, now: float) -> bool:
        """Take one more GET; return whether they show that there is none.

        While Kueue is being removed, the API server says for a moment that neither Workloads nor classes exist.
        """
        if now - self.last > MAX_GAP_SECONDS:
            self.first = now
        self.last = now
        return now - self.first >= LOOKUP_SECONDS

    def end(self) -> None:
        """Begin a new row."""
        self.first = self.last = -math.inf


async def has_workload(
    cluster: Cluster, cache: Cache, job: Json, absence: Absence, clock: Callable[[], float], *, uses_kueue: bool
) -> bool | None:
    """Read the Workload again: an old one may show an admission that has ended, or not yet begun.

    clock: monotonic seconds. uses_kueue: jobs with a queue wait for Kueue.

    Returns: ``Observed.has_workload``.
    """
    meta = job["metadata"]
    place = meta["namespace"], names.service_name(meta["name"], meta["uid"])
    known = cache.get(names.WORKLOADS, *place)
    is_queued = uses_kueue and bool((meta.get("labels") or {}).get(names.LABEL_QUEUE))
    exists: bool | None = None
    if known is not None or is_queued:
        uid = known["metadata"]["uid"] if known is not None else ""
        try:
            found = await read_into(cache, cluster, names.WORKLOADS, place, uid, wake=False)
            exists = found is not None and owner_uid(found) == meta["uid"]
        except ClusterError as error:  # Kueue is away, which must keep no job from ending
            logger.info("Workload %s cannot be read: %s", place[1], error)
    if exists is False:
        return False if absence.lasts(clock()) else None
    absence.end()
    return exists
