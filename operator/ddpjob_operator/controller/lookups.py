"""Objects of the cluster that plans of queued jobs need, read when a plan asks for them.

Flavors and priority classes are few, change seldom and belong to no job, so they are not watched; one that was read is
used for a minute. Whether a job has a Workload of Kueue is asked again before an attempt depends on it.
"""

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, owner_uid
from ddpjob.api.pods import is_object_name
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob.engine.observed import Unknown
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, NotFound
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import read_into

logger = logging.getLogger(__name__)

KEPT_SECONDS = 3600.0
"""How long a value is kept that no plan asks for, in place of one that cannot be read for a moment."""
MAX_GAP_SECONDS = 2 * LOOKUP_SECONDS
"""Answers with a longer gap between them are not in a row: nothing was asked meanwhile."""

Lookup = tuple[Resource, str]


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


class Lookups:
    """Reads objects by kind and name, and keeps them. clock: monotonic seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._found: dict[Lookup, tuple[float, Json | Unknown]] = {}

    def found(self) -> dict[Lookup, Json | Unknown]:
        """Return what was read within the last minute, also which objects could not be read."""
        now = self._clock()
        self._found = {
            wanted: (time, value)
            for wanted, (time, value) in self._found.items()
            if now - time < (KEPT_SECONDS if isinstance(value, dict) else LOOKUP_SECONDS)
        }
        return {wanted: value for wanted, (time, value) in self._found.items() if now - time < LOOKUP_SECONDS}

    async def read(self, wanted: Collection[Lookup]) -> dict[Lookup, Json | Unknown]:
        """Read objects, and return them.

        If the API server does not answer, or with an error that says nothing about the object, the last value stays.
        Users write some of the names. A name that no object can have is not sent, because it may change the URL.
        """
        for kind, name in wanted:
            value: Json | Unknown
            if not is_object_name(name):
                self._found[kind, name] = self._clock(), Unknown("no object can have this name")
                continue
            try:
                value = await self._cluster.get(kind, "", name)
            except (NotFound, Forbidden) as error:
                value = Unknown(str(error))
            except ClusterError as error:
                _, known = self._found.get((kind, name), (0.0, None))
                value = known if isinstance(known, dict) else Unknown(str(error), is_final=False)
            self._found[kind, name] = self._clock(), value
        return {each: self._found[each][1] for each in wanted}

    async def has_workload(self, cache: Cache, job: Json, absence: Absence, *, uses_kueue: bool | None) -> bool | None:
        """Read the Workload again: an old one may show an admission that has ended, or not yet begun.

        uses_kueue: jobs with a queue wait for Kueue.

        Returns: ``Observed.has_workload``.
        """
        meta = job["metadata"]
        place = meta["namespace"], names.service_name(meta["name"], meta["uid"])
        known = cache.get(names.WORKLOADS, *place)
        is_queued = bool(uses_kueue and (meta.get("labels") or {}).get(names.LABEL_QUEUE))
        exists: bool | None = None
        if known is not None or is_queued:
            uid = known["metadata"]["uid"] if known is not None else ""
            try:
                found = await read_into(cache, self._cluster, names.WORKLOADS, place, uid, wake=False)
                exists = found is not None and owner_uid(found) == meta["uid"]
            except ClusterError as error:  # Kueue is away, which must keep no job from ending
                logger.info("Workload %s cannot be read: %s", place[1], error)
        if exists is False:
            return False if absence.lasts(self._clock()) else None
        absence.end()
        return exists
