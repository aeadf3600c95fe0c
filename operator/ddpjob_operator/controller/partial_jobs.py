"""The jobs of which only some pods have a Kubernetes node, and the jobs that gave theirs back: the eldest.

It follows from the recorded statuses, so each operator that caches the same jobs comes to the same result, and so does
one that was restarted. Only what becomes the eldest, or was it, wakes others:

- A job becomes the eldest: the one before has an elder now. All others had one already.
- The eldest leaves, or has counted for long enough: the next one has no elder any more, nor have the jobs before it
  that yielded; these may start.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.api.times import seconds_since
from ddpjob.engine.observed import Elder
from ddpjob.engine.scheduling.guard import Rank, Standing, standing


class PartialJobs:
    """The standings of the cached jobs; ``wake`` is called with the key of a job whose elder came or went."""

    def __init__(self, wake: Callable[[Key], None], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._wake, self._now = wake, now
        self._pools: dict[str, _Pool] = {}
        self._pool_of: dict[Key, _Pool] = {}

    def observe(self, key: Key, job: Json | None) -> None:
        """Take the cached job with this key, or None for one that is gone."""
        found = standing(job) if job is not None else None
        known = self._pool_of.pop(key, None)
        pool = self._pools.setdefault(found.pool, _Pool(self._wake, self._now)) if found is not None else None
        if known is not None and known is not pool:
            known.observe(key, None)
        if pool is not None:
            self._pool_of[key] = pool
            pool.observe(key, found)

    def elder(self, key: Key) -> Elder | None:
        """Return the eldest job if it is elder than the one with this key, which is partial or has yielded."""
        pool = self._pool_of.get(key)
        return pool.elder(key) if pool is not None else None


class _Pool:
    """The partial and yielded jobs that request one kind of device."""

    def __init__(self, wake: Callable[[Key], None], now: Callable[[], datetime]) -> None:
        self._wake, self._now = wake, now
        self._partial: dict[Key, Standing] = {}
        self._yielded: dict[Key, Rank] = {}
        self._eldest: Key | None = None

    def observe(self, key: Key, found: Standing | None) -> None:
        before = self._partial[self._eldest] if self._eldest is not None else None
        self._yielded.pop(key, None)
        self._partial.pop(key, None)
        if found is not None and found.since is not None:
            self._partial[key] = found
        elif found is not None:
            self._yielded[key] = found.rank
        self._choose(key, before)

    def elder(self, key: Key) -> Elder | None:
        if self._eldest is not None and not self._counts(self._eldest):
            self._choose(self._eldest, self._partial[self._eldest])
        own = self._partial[key].rank if key in self._partial else self._yielded.get(key)
        if own is None or self._eldest is None:
            return None
        rank, since = self._partial[self._eldest][:2]
        return Elder(*self._eldest, since or "") if rank < own else None

    def _counts(self, key: Key) -> bool:
        known = self._partial[key]
        return known.since is not None and seconds_since(known.since, self._now()) < known.left

    def _choose(self, changed: Key, before: Standing | None) -> None:
        """Determine the eldest after a change of one job, and wake the jobs for which it matters."""
        known, found = self._eldest, self._partial.get(changed)
        if known is None or known == changed:
            self._eldest = min(
                filter(self._counts, self._partial), key=lambda key: self._partial[key].rank, default=None
            )
        elif found is not None and found.rank < self._partial[known].rank and self._counts(changed):
            self._eldest = changed
        if known is not None and known in self._partial and known != self._eldest:
            self._wake(known)
        after = self._partial[self._eldest].rank if self._eldest is not None else None
        if before is None or (after is not None and after <= before.rank):
            return
        freed = [key for key, rank in self._yielded.items() if before.rank < rank and (after is None or rank < after)]
        if self._eldest is not None:
            freed.append(self._eldest)
        for key in freed:
            self._wake(key)
