"""The work queue of job keys. A waiting key is not queued twice, and a key is never processed twice at the same time.

    add ─▶ waiting (one line per namespace, served in turn) ─▶ running ─▶ done, or again if added meanwhile
    add_after ─▶ timer ─▶ add

Delays use the time of the running event loop, so tests can use a loop with simulated time.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from ddpjob.controller.cache import Key

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
MAX_DELAY = 30.0

Process = Callable[[Key], Awaitable[None]]


class WorkQueue:
    """Keys that wait to be processed; ``run`` processes them, ``workers`` at a time."""

    def __init__(self, workers: int = 8) -> None:
        self._workers = workers
        self._lines: OrderedDict[str, deque[Key]] = OrderedDict()
        self._waiting: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._news = asyncio.Event()
        self._stopping = False

    @property
    def depth(self) -> int:
        """Number of keys that wait for a worker."""
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Queue ``key``; adding it again while it waits has no effect."""
        if self._stopping or key in self._waiting:
            return
        if key in self._running:
            self._again.add(key)
            return
        self._waiting.add(key)
        self._lines.setdefault(key.namespace, deque()).append(key)
        self._news.set()

    def add_after(self, key: Key, delay: float) -> None:
        """Queue ``key`` after ``delay`` seconds; of several delays the shortest counts."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if self._stopping or (timer is not None and timer.when() <= loop.time() + delay):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay, self._on_time, key)

    def retry(self, key: Key, at_least: float = 0.0) -> float:
        """Queue ``key`` again with exponential backoff and jitter; return the delay in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(FIRST_DELAY * 2.0 ** min(failures - 1, 20), MAX_DELAY)
        delay = min(max(delay * random.uniform(0.5, 1.0), at_least), MAX_DELAY)  # noqa: S311
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """Reset the backoff of ``key`` after a success."""
        self._failures.pop(key, None)

    async def run(self, process: Process, stop: asyncio.Event, grace: float = 10.0) -> None:
        """Call ``process(key)`` for each added key until ``stop`` is set.

        Calls that run then get ``grace`` seconds to end; keys that wait are dropped.
        """
        workers = [asyncio.create_task(self._work(process), name=f"worker-{n}") for n in range(self._workers)]
        await stop.wait()
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        self._news.set()
        _, late = await asyncio.wait(workers, timeout=grace)
        for worker in late:
            worker.cancel()
        if late:
            logger.warning("%d reconcile(s) did not end within %g s and were cancelled", len(late), grace)
            await asyncio.wait(late)

    async def _work(self, process: Process) -> None:
        while not self._stopping:
            key = self._next()
            if key is None:
                self._news.clear()
                await self._news.wait()
                continue
            self._running.add(key)
            # A timer set before this run is obsolete.
            if timer := self._timers.pop(key, None):
                timer.cancel()
            try:
                await process(key)
            except Exception:  # process handles its own errors; this is a bug in it
                logger.exception("processing %s failed", key)
                self.retry(key)
            finally:
                self._running.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)

    def _next(self) -> Key | None:
        """Return the first key of the next namespace, so that many jobs in one namespace do not delay another's."""
        while self._lines:
            namespace, line = self._lines.popitem(last=False)
            if line:
                key = line.popleft()
                self._waiting.discard(key)
                if line:
                    self._lines[namespace] = line
                return key
        return None

    def _on_time(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
