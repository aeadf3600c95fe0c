"""All changes of the jobs and of what they own, in all namespaces, from watches of the API server."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self, TypeVar

import aiohttp

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.worlds.memory.store import Change

T = TypeVar("T")
RESOURCES = (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS, names.EVENTS)
WAIT_SECONDS = 120.0
PROBE_SECONDS = 0.1  # for a probe of something else than the history


class History:
    """Use as an async context manager. ``session`` is authorized, and its base URL is the API server.

    on_change: called with each change, in the order of arrival.
    """

    def __init__(self, session: aiohttp.ClientSession, on_change: Callable[[Change], None]) -> None:
        self._session = session
        self._on_change = on_change
        self._changes: dict[str, list[tuple[float, Change]]] = defaultdict(list)
        self._objects: dict[str, dict[tuple[Resource, str], Json]] = defaultdict(dict)  # by namespace
        self._news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._watches = [asyncio.create_task(self._watch(resource)) for resource in RESOURCES]
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def changes(self, namespace: str) -> list[tuple[float, Change]]:
        """Return the changes in a namespace, in the order of the API server."""
        return sorted(self._changes[namespace], key=lambda each: each[1].version)

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        return self._objects[namespace].get((resource, name))

    def objects(self, resource: Resource, namespace: str) -> list[Json]:
        return [obj for (kind, _), obj in self._objects[namespace].items() if kind is resource]

    async def until(self, namespace: str, what: Callable[[], str], probe: Callable[[], T | None]) -> T:
        """Return the first true value of ``probe``, which is called after each change in the namespace."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (value := probe()):
            assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:g} s: {what()}"
            for watch in self._watches:
                assert not watch.done(), f"a watch ended: {watch}"
            try:
                await asyncio.wait_for(self._news[namespace].wait(), PROBE_SECONDS)
            except TimeoutError:
                continue
        return value

    async def _watch(self, resource: Resource) -> None:
        params = {"watch": "true", "timeoutSeconds": "3600"}
        async with self._session.get(f"/{resource.path()}", params=params) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                self._take(resource, event["type"], event["object"])

    def _take(self, resource: Resource, kind: str, obj: Json) -> None:
        meta = obj["metadata"]
        assert kind in ("ADDED", "MODIFIED", "DELETED"), obj
        namespace, key = meta.get("namespace", ""), (resource, meta["name"])
        before = self._objects[namespace].pop(key, None)
        if kind != "DELETED":
            self._objects[namespace][key] = obj
        change = Change(kind, resource, int(meta["resourceVersion"]), obj, before)  # type: ignore[arg-type]
        self._changes[namespace].append((time.monotonic(), change))
        self._on_change(change)
        self._news.pop(namespace, asyncio.Event()).set()
