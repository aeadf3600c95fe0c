"""Whether a job has a Workload of Kueue, asked again before an attempt depends on it."""

import logging
from collections.abc import Callable

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob_operator.cluster.base import Cluster, ClusterError
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.entries import Place
from ddpjob_operator.controller.listing import read_into

logger = logging.getLogger(__name__)

MAX_GAP_SECONDS = 2 * LOOKUP_SECONDS
"""Answers with a longer gap between them are not in a row: nothing was asked meanwhile."""


class Workloads:
    """What is known of the Workloads besides the cache.

    clock: monotonic seconds. uses_kueue: jobs with a queue wait for Kueue.
    """

    def __init__(self, cluster: Cluster, cache: Cache, clock: Callable[[], float], *, uses_kueue: bool) -> None:
        self._cluster, self._cache, self._clock, self._uses_kueue = cluster, cache, clock, uses_kueue
        # By uid of the job: monotonic times of the first and the last GET in a row that showed no Workload.
        self._absent: dict[str, tuple[float, float]] = {}

    async def exists(self, job: Json) -> bool | None:
        """Read the Workload again: an old one may show an admission that has ended, or not yet begun.

        Returns: ``Observed.has_workload``. While Kueue is being removed, the API server says for a moment that neither
        Workloads nor classes exist, so a single answer is not enough.
        """
        known = self._cache.get(names.WORKLOADS, *_place_of(job))
        is_queued = self._uses_kueue and bool((job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE))
        uid, job_uid = known["metadata"]["uid"] if known is not None else "", job["metadata"]["uid"]
        exists = await self._read(job, uid) if uid or is_queued else None
        if exists is not False:
            self.forget(job_uid)
            return exists
        now = self._clock()
        first, last = self._absent.get(job_uid, (now, now))
        first = first if now - last <= MAX_GAP_SECONDS else now
        self._absent[job_uid] = first, now
        return False if now - first >= LOOKUP_SECONDS else None

    def forget(self, job_uid: str) -> None:
        """Begin a new row of answers: nothing had to be asked, or the job is gone."""
        self._absent.pop(job_uid, None)

    async def _read(self, job: Json, uid: str) -> bool | None:
        """Return whether it exists and is the job's; None if the API server did not answer. uid: of the cached one."""
        place = _place_of(job)
        try:
            found = await read_into(self._cache, self._cluster, names.WORKLOADS, place, uid, wake=False)
        except ClusterError as error:  # Kueue is away, which must keep no job from ending
            logger.info("Workload %s cannot be read: %s", place[1], error)
            return None
        return found is not None and owner_uid(found) == job["metadata"]["uid"]


def _place_of(job: Json) -> Place:
    """Return namespace and name of the Workload of a job."""
    meta = job["metadata"]
    return meta["namespace"], names.service_name(meta["name"], meta["uid"])
