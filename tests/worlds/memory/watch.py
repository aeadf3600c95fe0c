"""Watches: events for the changes that match a selector.

As in the API server, an object that begins to match is ADDED and one that no longer matches is DELETED.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.worlds.memory.selectors import Matcher
from tests.worlds.memory.store import Change, clone

WatchEvent = dict[str, Any]
"""``{"type": "ADDED" | "MODIFIED" | "DELETED", "object": {...}}``."""


class Watch(AsyncIterator[WatchEvent]):
    """One open watch, read with ``async for``. It ends after ``close``."""

    def __init__(self, resource: Resource, namespace: str | None, matches: Matcher) -> None:
        self._resource = resource
        self._namespace = namespace
        self._matches = matches
        self._events: deque[WatchEvent] = deque()
        self._news = asyncio.Event()
        self.closed = False

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            if self.closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()

    def take(self) -> list[WatchEvent]:
        """Return the events that can be read without waiting."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def close(self) -> None:
        """End the watch. Events not read yet can still be read."""
        self.closed = True
        self._news.set()

    def offer(self, change: Change) -> None:
        """Add the event of a change if this watch covers it."""
        if self.closed or change.resource is not self._resource or not self._is_here(change.obj):
            return
        kind = self._type_of(change)
        obj = change.obj
        if kind == "DELETED" and change.before is not None:
            # An object that no longer matches is sent as it last matched, with the version of the change.
            version = obj["metadata"]["resourceVersion"]
            obj = change.before | {"metadata": change.before["metadata"] | {"resourceVersion": version}}
        if kind is not None:
            self._put({"type": kind, "object": clone(obj)})

    def start_with(self, objects: Iterable[Json]) -> None:
        """Send the objects that exist: the start of a watch without a version."""
        for obj in objects:
            if self._is_here(obj) and self._matches(obj):
                self._put({"type": "ADDED", "object": clone(obj)})

    def _put(self, event: WatchEvent) -> None:
        self._events.append(event)
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
