"""Watches: a view of the history through selectors, and of what is written from now on.

An object that begins to match is ADDED and one that ceases to is DELETED, as the API server tells it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal, Self

from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.base import ClusterError, Unavailable
from ddpjob.cluster.memory.selectors import Matcher
from ddpjob.cluster.memory.store import Change, clone

WatchEvent = dict[str, Any]
"""``{"type": "ADDED" | "MODIFIED" | "DELETED", "object": {...}}``."""


class Watch(AsyncIterator[WatchEvent]):
    """One open watch: iterate with ``async for``. It ends after ``close`` and raises what ``fail`` was given."""

    def __init__(self, resource: Resource, namespace: str | None, matches: Matcher) -> None:
        self._resource = resource
        self._namespace = namespace
        self._matches = matches
        self._events: deque[WatchEvent] = deque()
        self._held: deque[WatchEvent] | None = None
        self._news = asyncio.Event()
        self._error: ClusterError | None = None
        self.closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()

    def take(self) -> list[WatchEvent]:
        """What can be read without waiting."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def close(self) -> None:
        """End the watch; what was not read yet is still handed out."""
        self.closed = True
        self._news.set()

    def fail(self, error: ClusterError) -> None:
        """Break the watch: events not read yet are lost."""
        self._events.clear()
        self._error = error
        self.close()

    def hold(self) -> None:
        """Keep events back from now on, as an API server whose cache lags behind."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        """Hand out what was held back."""
        held, self._held = self._held or (), None
        self._events.extend(held)
        self._news.set()

    def offer(self, change: Change) -> None:
        """Take in a change if it concerns this watch."""
        if change.resource is not self._resource or not self._is_here(change.obj):
            return
        kind = self._type_of(change)
        obj = change.obj
        if kind == "DELETED" and change.before is not None:
            # What ceased to match is told as it was when it last did, at the version of the change.
            version = obj["metadata"]["resourceVersion"]
            obj = change.before | {"metadata": change.before["metadata"] | {"resourceVersion": version}}
        if kind is not None:
            self._put({"type": kind, "object": clone(obj)})

    def start_with(self, objects: Iterable[Json]) -> None:
        """Begin with what is there: a watch from no particular version."""
        for obj in objects:
            if self._is_here(obj) and self._matches(obj):
                self._put({"type": "ADDED", "object": clone(obj)})

    def _put(self, event: WatchEvent) -> None:
        (self._events if self._held is None else self._held).append(event)
        self._news.set()

    def _is_here(self, obj: Json) -> bool:
        return self._namespace in (None, obj["metadata"]["namespace"])

    def _type_of(self, change: Change) -> Literal["ADDED", "MODIFIED", "DELETED"] | None:
        did = change.before is not None and self._matches(change.before)
        does = change.type != "DELETED" and self._matches(change.obj)
        if did and does:
            return "MODIFIED"
        if did or does:
            return "ADDED" if does else "DELETED"
        return None


class Watches:
    """All open watches of one server, and what a test can do to them."""

    def __init__(self) -> None:
        self._open: list[Watch] = []

    def add(self, watch: Watch) -> None:
        self._open = [other for other in self._open if not other.closed] + [watch]

    def offer(self, change: Change) -> None:
        """Tell every watch of a change."""
        for watch in self._open:
            if not watch.closed:
                watch.offer(change)

    def hold(self) -> None:
        """Every watch lags behind from now on: what the clients believe gets stale."""
        for watch in self._open:
            watch.hold()

    def release(self) -> None:
        """Every watch catches up."""
        for watch in self._open:
            watch.release()

    def cut(self) -> None:
        """Every connection breaks, with the events in flight."""
        for watch in self._open:
            watch.fail(Unavailable("watch: connection reset"))
        self._open.clear()
