"""Watches that are late, reordered or interrupted: the operator's cache then holds old versions.

The events of one object always arrive in order, as in a cluster; those of different objects may not.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from tests.worlds.memory.faulty import FaultyCluster

LOSSLESS = ("prompt", "late", "late-jobs", "late-pods", "shuffled")
MODES = (*LOSSLESS, "dropped", "interrupted", "restored")
"""How watch events arrive.

late: all some seconds late. late-jobs, late-pods: only those of one kind. shuffled: each object with a delay of its
own. dropped: one of three is lost, and the watch is opened again later, which reports no deletions. interrupted: for
a while all are lost, as without the CRD or with errors of the API server. restored: once the versions of all objects go
back, as after etcd was restored.
"""

DELAY_SECONDS = 8.0
MAX_DELAY_SECONDS = 20.0
DROPPED_SHARE = 0.33
CALM_SECONDS = 30.0
"""The longest time until watches are interrupted or etcd is restored."""


class Watches:
    """Opens the watches of one process of the operator. ``relist`` is called some time after an event was lost."""

    def __init__(self, mode: str, seed: str, cluster: FaultyCluster, relist: Callable[[], None]) -> None:
        self._mode = mode
        self._chance = random.Random(seed)
        self._cluster = cluster
        self._relist = relist
        self._is_open = True
        self._timers: list[asyncio.TimerHandle] = []
        if mode == "interrupted":
            self._later(CALM_SECONDS, self._interrupt)
        elif mode == "restored":
            self._later(CALM_SECONDS, self._restore)

    def close(self) -> None:
        """Disturb nothing any more, because the process has ended."""
        for timer in self._timers:
            timer.cancel()

    def open(self, resource: Resource, label_selector: str | None) -> AsyncIterator[Any]:
        """Return the events of a kind."""
        watch = self._cluster.watch(resource, label_selector=label_selector)
        is_late = self._mode in ("late", "shuffled", "late-jobs" if resource is names.DDPJOBS else "late-pods")
        if self._mode == "dropped":
            return self._with_losses(watch)
        if self._mode == "interrupted":
            return self._while_open(watch)
        return self._delayed(watch) if is_late else watch

    async def _with_losses(self, watch: AsyncIterator[Any]) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        async for event in watch:
            if self._chance.random() < DROPPED_SHARE:
                loop.call_later(self._chance.uniform(1.0, MAX_DELAY_SECONDS), self._relist)
            else:
                yield event

    async def _while_open(self, watch: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for event in watch:
            if self._is_open:
                yield event

    def _interrupt(self) -> None:
        self._is_open = False
        self._later(MAX_DELAY_SECONDS, self._open_again)

    def _open_again(self) -> None:
        self._is_open = True
        self._relist()

    def _restore(self) -> None:
        self._cluster.store.renumber()
        self._later(MAX_DELAY_SECONDS, self._relist)

    def _later(self, longest: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(self._chance.uniform(1.0, longest), act))

    async def _delayed(self, watch: AsyncIterator[Any]) -> AsyncIterator[Any]:
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        pump = asyncio.create_task(self._pump(watch, arrived))
        try:
            while True:
                yield await arrived.get()
        finally:
            pump.cancel()

    async def _pump(self, watch: AsyncIterator[Any], arrived: "asyncio.Queue[Any]") -> None:
        loop = asyncio.get_running_loop()
        due: dict[str, float] = defaultdict(float)
        async for event in watch:
            uid = event["object"]["metadata"]["uid"]
            due[uid] = max(due[uid], loop.time() + self._delay())
            loop.call_at(due[uid], arrived.put_nowait, event)

    def _delay(self) -> float:
        return self._chance.uniform(0.0, MAX_DELAY_SECONDS) if self._mode == "shuffled" else DELAY_SECONDS
