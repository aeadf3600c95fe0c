"""Objects of the cluster that plans of queued jobs need: flavors and priority classes, read when a plan asks for them.

They are few, change seldom and belong to no job, so they are not watched; one that was read is used for a minute.
"""

import time
from collections.abc import Callable, Collection

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.pods import is_object_name
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob.engine.observed import Unknown
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, NotFound

KEPT_SECONDS = 3600.0
"""How long a value is kept that no plan asks for, in place of one that cannot be read for a moment."""

Lookup = tuple[Resource, str]


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
