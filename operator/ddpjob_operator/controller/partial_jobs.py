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
    """The partial and yielded jobs; ``wake`` is called with the key of a job whose elder came or went."""

    def __init__(self, wake: Callable[[Key], None], now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._wake, self._now = wake, now
        self._standings: dict[Key, Standing] = {}
        self._eldest: dict[str, tuple[Key, Rank]] = {}
        """Of each pool, the jobs that request one kind of device."""

    def observe(self, key: Key, job: Json | None) -> None:
        """Take the cached job with this key, or None for one that is gone."""
        known, found = self._standings.pop(key, None), standing(job) if job is not None else None
        if found is not None:
            self._standings[key] = found
        for pool in {each.pool for each in (known, found) if each is not None}:
            self._choose(pool)

    def elder(self, key: Key) -> Elder | None:
        """Return the eldest job if it is elder than the one with this key, which is partial or has yielded."""
        if (own := self._standings.get(key)) is None:
            return None
        if own.pool in self._eldest and not self._counts(self._standings[self._eldest[own.pool][0]]):
            self._choose(own.pool)
        if own.pool not in self._eldest:
            return None
        eldest, rank = self._eldest[own.pool]
        return Elder(*eldest, self._standings[eldest].since or "") if rank < own.rank else None

    def _counts(self, each: Standing) -> bool:
        return each.since is not None and seconds_since(each.since, self._now()) < each.left

    def _choose(self, pool: str) -> None:
        """Determine the eldest job of a pool after a change, and wake the jobs for which it matters."""
        members = {key: each for key, each in self._standings.items() if each.pool == pool}
        known, before = self._eldest.pop(pool, (None, None))
        after = min(((each.rank, key) for key, each in members.items() if self._counts(each)), default=None)
        if after is not None:
            self._eldest[pool] = after[1], after[0]
        if known in members and members[known].since is not None and (after is None or known != after[1]):
            self._wake(known)
        if before is None or (after is not None and after[0] <= before):
            return
        for key, each in members.items():
            if each.since is None and before < each.rank and (after is None or each.rank < after[0]):
                self._wake(key)
        if after is not None:
            self._wake(after[1])
