"""The slots for concurrent requests that delete and create objects, shared fairly by namespaces and jobs.

A request may take as long as an admission webhook lets it, and cannot be taken back. So a job gets a slot only while
more slots are free than it holds, and a namespace only while it holds fewer than twice the number of free ones
("dynamic thresholds", as in network switches). A job alone can use half of all slots. The next job finds free slots,
even if the requests before it are slow. The shares of n equally busy jobs become equal.
"""

import asyncio
from collections import Counter, deque
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
        self._waiting: dict[Owner, deque[asyncio.Future[None]]] = {}

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
        if owner not in self._waiting and self._may_take(owner):
            self._hold(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(owner, turn)
            else:  # granted in the same step
                self._release(owner)
            raise

    def _may_take(self, owner: Owner) -> bool:
        return self._held[owner] < PER_JOB * self._free and self._held_in[owner[0]] < PER_NAMESPACE * self._free

    def _hold(self, owner: Owner) -> None:
        self._free -= 1
        self._held[owner] += 1
        self._held_in[owner[0]] += 1

    def _release(self, owner: Owner) -> None:
        self._free += 1
        self._held -= Counter([owner])  # which keeps no zeros
        self._held_in -= Counter([owner[0]])
        self._serve()

    def _serve(self) -> None:
        """Grant free slots, first to the namespace and then to the job that holds the fewest."""
        while self._waiting and self._free:
            waiting = sorted(self._waiting, key=lambda owner: (self._held_in[owner[0]], self._held[owner]))
            owner = next(filter(self._may_take, waiting), None)
            if owner is None:
                return
            turn = self._waiting[owner][0]
            self._leave(owner, turn)
            if not turn.done():  # a cancelled one is done
                self._hold(owner)
                turn.set_result(None)

    def _leave(self, owner: Owner, turn: "asyncio.Future[None]") -> None:
        line = self._waiting.get(owner, deque())
        if turn in line:
            line.remove(turn)
        if not line:
            self._waiting.pop(owner, None)
