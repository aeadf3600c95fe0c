"""The slots for concurrent requests that delete and create objects, shared fairly by namespaces and jobs.

A request may take as long as an admission webhook lets it, and cannot be taken back. So a job gets a slot only while
more slots are free than it holds, and a namespace only while it holds fewer than twice the number of free ones
("dynamic thresholds", as in network switches). A job alone can use half of all slots. The next job finds free slots,
even if the requests before it are slow. The shares of n equally busy jobs become equal.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PER_JOB = 1
PER_NAMESPACE = 2

Owner = tuple[str, str]
"""Namespace and uid of a job."""


class Slots:
    """``total`` slots. A free slot goes to the namespace, and within it to the job, that holds the fewest slots."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: Counter[Owner] = Counter()
        self._held_in: Counter[str] = Counter()
        self._waiting: list[tuple[Owner, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def take(self, namespace: str, job: str = "") -> AsyncIterator[None]:
        """Hold a slot. ``job`` is a uid; requests without one share the slots of one job of the namespace."""
        owner = (namespace, job)
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _acquire(self, owner: Owner) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((owner, turn))
            else:  # granted in the same step
                self._release(owner)
            raise

    def _may_take(self, owner: Owner) -> bool:
        return self._held[owner] < PER_JOB * self._free and self._held_in[owner[0]] < PER_NAMESPACE * self._free

    def _release(self, owner: Owner) -> None:
        self._free += 1
        self._held -= Counter([owner])
        self._held_in -= Counter([owner[0]])
        self._serve()

    def _serve(self) -> None:
        """Grant free slots, first to the namespace and then to the job that holds the fewest."""
        while waiting := [each for each in self._waiting if not each[1].done() and self._may_take(each[0])]:
            owner, turn = min(waiting, key=lambda each: (self._held_in[each[0][0]], self._held[each[0]]))
            self._waiting.remove((owner, turn))
            self._free -= 1
            self._held[owner] += 1
            self._held_in[owner[0]] += 1
            turn.set_result(None)
