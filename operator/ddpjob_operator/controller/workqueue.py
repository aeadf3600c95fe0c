"""The work queue of job keys. A waiting key is not queued twice, and a key is never processed twice at the same time.

    add ─▶ waiting (one line per namespace, served in turn) ─▶ running ─▶ done, or again if added meanwhile
    add_after ─▶ timer ─▶ add
    add_soon ─▶ add, at most once in ``PACE_SECONDS``

At most ``workers`` keys run, and one more in each namespace that would have none: a running key cannot be interrupted,
so slow reconciles of one namespace must not take the last worker from another. In each pass of the event loop at most
one key starts: a reconcile begins with a plan, which takes up to 10 ms for a large spec, and each request of another
job would else wait for the plans of all workers.

Delays use the time of the running event loop, so tests can use a loop with simulated time.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable

from ddpjob.api.backoff import doubling
from ddpjob.api.names import Key

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
MAX_DELAY = 30.0
PACE_SECONDS = 0.25

Process = Callable[[Key], Awaitable[None]]


class WorkQueue:
    """Keys that wait to be processed; ``run`` processes them, ``workers`` at a time."""

    def __init__(self, workers: int = 8) -> None:
        self._workers = workers
        self._process: Process | None = None
        self._lines: OrderedDict[str, deque[Key]] = OrderedDict()
        self._waiting: set[Key] = set()
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._busy: Counter[str] = Counter()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._paced: dict[Key, bool] = {}
        self._failures: dict[Key, int] = {}
        self._stopping = False
        self._has_started = False

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
        self._wait_in_line(key)
        self._start_next()

    def add_soon(self, key: Key) -> None:
        """Queue ``key`` for a change that no decision waits for: at once, but then not for ``PACE_SECONDS``."""
        if self._stopping:
            return
        if key in self._paced:
            self._paced[key] = True
            return
        self._paced[key] = False
        self.add(key)
        asyncio.get_running_loop().call_later(PACE_SECONDS, self._on_pace, key)

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
        delay = doubling(FIRST_DELAY, failures, MAX_DELAY) * random.uniform(0.5, 1.0)  # noqa: S311
        delay = min(max(delay, at_least), MAX_DELAY)
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """Reset the backoff of ``key`` after a success."""
        self._failures.pop(key, None)

    async def run(self, process: Process, stop: asyncio.Event, grace: float = 10.0) -> None:
        """Call ``process(key)`` for each added key until ``stop`` is set.

        Calls that run then get ``grace`` seconds to end; keys that wait are dropped. Nothing starts after a
        cancellation either.
        """
        self._process = process
        self._start_next()
        try:
            await stop.wait()
        finally:
            self._stopping = True
            for timer in self._timers.values():
                timer.cancel()
        if not self._running:
            return
        _, late = await asyncio.wait(self._running.values(), timeout=grace)
        for task in late:
            task.cancel()
        if late:
            logger.warning("%d reconcile(s) did not end within %g s and were cancelled", len(late), grace)
            await asyncio.wait(late)

    def _wait_in_line(self, key: Key) -> None:
        self._waiting.add(key)
        self._lines.setdefault(key.namespace, deque()).append(key)

    def _has_worker_for(self, namespace: str) -> bool:
        return len(self._running) < self._workers or not self._busy[namespace]

    def _start_next(self) -> None:
        """Start the next key that has a worker, unless one has started in this pass of the event loop."""
        if self._process is None or self._has_started or self._stopping:
            return
        # Only namespaces with a running key wait for a worker, so few are skipped.
        namespace = next(filter(self._has_worker_for, self._lines), None)
        if namespace is None:
            return
        self._has_started = True
        asyncio.get_running_loop().call_soon(self._on_next_pass)
        line = self._lines.pop(namespace)
        key = line.popleft()
        if line:
            self._lines[namespace] = line  # now the last in turn
        self._waiting.discard(key)
        self._busy[namespace] += 1
        # A run reads all changes up to now: a timer set before it is obsolete.
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._paced:
            self._paced[key] = False
        work = self._work(key, self._process)
        self._running[key] = asyncio.create_task(work, name=f"reconcile {key.namespace}/{key.name}")

    def _on_next_pass(self) -> None:
        self._has_started = False
        self._start_next()

    async def _work(self, key: Key, process: Process) -> None:
        try:
            await process(key)
        except Exception:  # process handles its own errors; this is a bug in it
            logger.exception("processing %s failed", key)
            self.retry(key)
        except BaseException:  # cancelled: the program ends
            self._stopping = True
            raise
        finally:
            del self._running[key]
            self._busy -= Counter([key.namespace])  # which keeps no zeros
            if key in self._again:
                self._again.discard(key)
                self._wait_in_line(key)
            self._start_next()

    def _on_pace(self, key: Key) -> None:
        if self._paced.pop(key):
            self.add_soon(key)

    def _on_time(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
