"""The objects, the version counter that every write increments, and the history for watches.

Stored objects are never changed: a write replaces the object, so readers can share it.
"""

import marshal
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json

HISTORY_LIMIT = 10_000
"""Number of changes kept for watches. A watch from an older version gets 410."""

Place = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True)
class Change:
    """One write. ``obj``: the object after it, or as deleted; ``before``: the object that it replaced."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    resource: Resource
    version: int
    obj: Json
    before: Json | None


class Store:
    """Stores objects by kind, namespace and name. ``on_change`` is called with the change after every write."""

    def __init__(self, on_change: Callable[[Change], None]) -> None:
        self._on_change = on_change
        self._objects: dict[Resource, dict[Place, Json]] = defaultdict(dict)
        self._history: deque[Change] = deque()
        self._renumbered: dict[tuple[str, ...], list[Json]] = defaultdict(list)
        self.version = 1
        self.oldest = 1
        """The history is complete from this version."""

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return the stored object, which must not be changed, or None."""
        return self._objects[resource].get((namespace, name))

    def all(self, resource: Resource, namespace: str | None = None) -> Iterator[Json]:
        """Yield the objects of a kind in the API server's order: by namespace and name."""
        objects = self._objects[resource]
        # etcd sorts by the key's bytes, and the key is /registry/<kind>/<namespace>/<name>.
        for place in sorted(objects, key="/".join):
            if namespace is None or place[0] == namespace:
                yield objects[place]

    def everything(self, without: Collection[Resource] = ()) -> Iterator[tuple[Resource, Json]]:
        """Yield all objects, kind by kind. without: the kinds that are left out."""
        kinds = [resource for resource in self._objects if resource not in without]
        return ((resource, obj) for resource in kinds for obj in self.all(resource))

    def put(self, resource: Resource, obj: Json) -> Json:
        """Store a new object or a new version of one. Return it with its resourceVersion."""
        meta = obj["metadata"]
        place, objects = (meta["namespace"], meta["name"]), self._objects[resource]
        self.version += 1
        stored = obj | {"metadata": meta | {"resourceVersion": str(self.version)}}
        before = objects.get(place)
        objects[place] = stored
        self._record(Change("MODIFIED" if before else "ADDED", resource, self.version, stored, before))
        return stored

    def remove(self, resource: Resource, obj: Json) -> Json:
        """Delete an object. Return its last state, with the version of the deletion."""
        meta = obj["metadata"]
        before = self._objects[resource].pop((meta["namespace"], meta["name"]))
        self.version += 1
        last = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self._record(Change("DELETED", resource, self.version, last, before))
        return last

    def changes_after(self, version: int) -> Iterator[Change]:
        """Yield the changes since ``version``. They are complete if that is not older than ``oldest``."""
        return (change for change in self._history if change.version > version)

    def compact(self) -> None:
        """Drop the history, as etcd does every five minutes. Watches from older versions get 410."""
        self._history.clear()
        self.oldest = self.version

    def renumber(self) -> None:
        """Give all objects the lowest versions, in the same order, as after etcd was restored from a backup."""
        self._keep_states(change.obj for change in self._history)
        versions = {int(obj["metadata"]["resourceVersion"]) for _, obj in self.everything()}
        new = {str(old): str(number) for number, old in enumerate(sorted(versions), start=1)}
        for objects in self._objects.values():
            for place, obj in objects.items():
                meta = obj["metadata"]
                objects[place] = obj | {"metadata": meta | {"resourceVersion": new[meta["resourceVersion"]]}}
        self.version = len(new) + 1
        self.compact()
        self._keep_states(obj for _, obj in self.everything())

    def is_ambiguous(self, obj: Json) -> bool:
        """Return whether the object's version stood for another state before objects were renumbered.

        Also for a state of another object of its name: a status patch names the version, not the uid.
        """
        return any(state != obj for state in self._renumbered.get(_named_version(obj), ()))

    def _keep_states(self, states: Iterable[Json]) -> None:
        """Keep the states that versions stand for, which will stand for others."""
        for obj in states:
            self._renumbered[_named_version(obj)].append(obj)

    def _record(self, change: Change) -> None:
        self._history.append(change)
        if len(self._history) > HISTORY_LIMIT:
            self.oldest = self._history.popleft().version
        self._on_change(change)


def _named_version(obj: Json) -> tuple[str, ...]:
    meta = obj["metadata"]
    return str(obj["kind"]), meta["namespace"], meta["name"], meta["resourceVersion"]


def clone(obj: Json) -> Json:
    """Return a deep copy, ten times faster than ``copy.deepcopy``."""
    copied: Json = marshal.loads(marshal.dumps(obj))  # only our own bytes are loaded  # noqa: S302
    return copied
