"""The cached jobs, pods, services and claims.

Watch events, LISTs and responses to the operator's own writes update the cache in any order: the newer resourceVersion
wins, and a deleted object stays deleted if an older response arrives later. Pods are trimmed to what the engine reads.

A change calls ``on_change`` with the key of the object's job. A pod's step towards Running calls ``on_pod_update``
instead, because a thousand pods take such steps within seconds and no decision waits for them; a change that trimming
removes calls nothing.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.cluster.base import Page
from ddpjob.engine.pod_view import CachedPod
from ddpjob.engine.trim import trim_pod

MAX_TOMBSTONES = 20_000  # several minutes at the highest rate; no response is older


WATCHED = (names.DDPJOBS, names.PODS)
"""Kinds whose changes come as watch events; the others are listed by the sweep."""


class Key(NamedTuple):
    """Namespace and name of a job: the element of the work queue and the argument of a reconcile."""

    namespace: str
    name: str


Place = tuple[str, str]
"""Namespace and name of any object."""


class Cache:
    """The cached objects of four kinds. Used from the event loop only, except ``count_states``."""

    def __init__(
        self,
        on_change: Callable[[Key], None] = lambda key: None,
        on_pod_update: Callable[[Key], None] | None = None,
    ) -> None:
        self._on_change = on_change
        self._on_pod_update = on_pod_update or on_change
        self._objects: dict[Resource, dict[Place, Json]] = {
            resource: {} for resource in (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS)
        }
        self._pods_of: dict[str, dict[Place, Json]] = defaultdict(dict)
        self._tombstones: OrderedDict[str, None] = OrderedDict()

    def job(self, key: Key) -> Json | None:
        """Return the cached job, or None."""
        return self._objects[names.DDPJOBS].get(key)

    def pods(self, uid: str) -> list[Json]:
        """Return the pods that have the label of the job with this uid."""
        return list(self._pods_of.get(uid, {}).values())

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return a cached object, or None."""
        return self._objects[resource].get((namespace, name))

    def unlabelled(self, resource: Resource) -> list[Json]:
        """Return adopted objects without the operator's label; the operator's LISTs do not return them."""
        return [obj for obj in self.objects(resource) if not is_labelled(resource, obj)]

    def count_states(self) -> Mapping[str, float]:
        """Return the number of jobs by ``status.state``, for the metrics."""
        jobs = self.objects(names.DDPJOBS)  # a copy: another thread reads the metrics
        return Counter(str((job.get("status") or {}).get("state") or "New") for job in jobs)

    def take(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """Apply a watch event with ``type`` and ``object``, as the API server sends it."""
        obj = event["object"]
        if event["type"] == "DELETED":
            meta = obj["metadata"]
            self.remove(resource, meta["namespace"], meta["name"], meta["uid"])
        else:
            self.put(resource, obj)

    def put(self, resource: Resource, obj: Json, *, wake: bool = True, same_version: bool = False) -> bool:
        """Store an object unless the cached one is newer; return whether the cache changed.

        wake: False does not queue the job of an object that is not a pod.
        same_version: replace an object of the same version, too.
        """
        uid, place = obj["metadata"]["uid"], _place(obj)
        known = self._objects[resource].get(place)
        oldest = _version(known) + (not same_version) if known is not None else 0
        if uid in self._tombstones or _version(obj) < oldest:
            return False
        if known is not None and known["metadata"]["uid"] != uid:
            self._drop(resource, known)
            known = None
        if resource is names.PODS:
            self._put_pod(place, obj, known)
        else:
            obj["metadata"].pop("managedFields", None)  # half of an object's size, and never used
            self._objects[resource][place] = obj
            if wake:
                self._wake(resource, obj)
        return True

    def _put_pod(self, place: Place, obj: Json, known: Json | None) -> None:
        siblings = self._pods_of[_job_uid(obj)]
        pod = CachedPod(trim_pod(obj, like=known or next(iter(siblings.values()), None)))
        if known is not None and _job_uid(known) != _job_uid(pod):
            self._leave_job(place, known)
        self._objects[names.PODS][place] = siblings[place] = pod
        if known is None or _state_of(pod) != _state_of(known):
            self._wake(names.PODS, pod)
        elif _without_version(pod) != _without_version(known) and (key := key_of(names.PODS, pod)):
            self._on_pod_update(key)

    def _leave_job(self, place: Place, pod: Json) -> None:
        """Remove a pod from those of its job."""
        uid = _job_uid(pod)
        siblings = self._pods_of.get(uid, {})
        siblings.pop(place, None)
        if not siblings:
            self._pods_of.pop(uid, None)

    def remove(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """Remove the object with this uid; return whether it was cached."""
        self._add_tombstone(uid)
        known = self._objects[resource].get((namespace, name))
        if known is None or known["metadata"]["uid"] != uid:
            return False
        self._drop(resource, known)
        self._wake(resource, known)
        return True

    def objects(self, resource: Resource) -> list[Json]:
        """Return all cached objects of a kind."""
        return list(self._objects[resource].values())

    def _wake(self, resource: Resource, obj: Json) -> None:
        if key := key_of(resource, obj):
            self._on_change(key)

    def _drop(self, resource: Resource, obj: Json) -> None:
        place, uid = _place(obj), obj["metadata"]["uid"]
        self._objects[resource].pop(place, None)
        if resource is names.PODS:
            self._leave_job(place, obj)
        self._add_tombstone(uid)

    def _add_tombstone(self, uid: str) -> None:
        self._tombstones[uid] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


class Listing:
    """Applies a LIST to the cache page by page: ``take`` each page, then ``finish``.

    covers: whether the LIST would contain a given object. Cached objects that it covers, but does not contain, and that
    are not newer than it, are removed at the end. Of earlier pages only the uids are kept.
    """

    def __init__(self, cache: Cache, resource: Resource, covers: Callable[[Json], bool]) -> None:
        self._cache = cache
        self._resource = resource
        self._covers = covers
        self._present: set[str] = set()
        self._limit = 0
        self._changes = 0

    def take(self, page: Page) -> None:
        """Store the objects of a page."""
        if page.is_first:
            self._present.clear()
            self._limit = _number(page.resource_version)
        for obj in page.items:
            self._changes += self._cache.put(self._resource, obj)
            self._present.add(obj["metadata"]["uid"])

    def finish(self) -> int:
        """Remove what no page contained; return the number of changed objects."""
        for obj in self._cache.objects(self._resource):
            meta = obj["metadata"]
            if meta["uid"] in self._present or not self._covers(obj) or _version(obj) > self._limit:
                continue
            removed = self._cache.remove(self._resource, meta["namespace"], meta["name"], meta["uid"])
            self._changes += removed
        return self._changes


def key_of(resource: Resource, obj: Mapping[str, Any]) -> Key | None:
    """Return the key of an object's job: from its label, or from its owner if a user removed the label."""
    meta = obj["metadata"]
    if resource is names.DDPJOBS:
        return Key(meta["namespace"], meta["name"])
    name = (meta.get("labels") or {}).get(names.LABEL_JOB_NAME) or _owner_of(meta)
    return Key(meta["namespace"], name) if name else None


def _owner_of(meta: Mapping[str, Any]) -> str | None:
    owners = meta.get("ownerReferences") or ()
    return next((owner.get("name") for owner in owners if owner.get("kind") == names.DDPJOBS.kind), None)


def is_labelled(resource: Resource, obj: Mapping[str, Any]) -> bool:
    """Whether the operator's own label selector of this kind finds the object."""
    return names.SELECTORS[resource] in (obj["metadata"].get("labels") or {})


def _place(obj: Json) -> Place:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _job_uid(pod: Json) -> str:
    return str((pod["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, ""))


def _state_of(pod: Json) -> tuple[Any, ...]:
    """Return the part of a trimmed pod whose changes decisions wait for: its deletion, and what in it has ended."""
    status = pod["status"]
    ended = [c["state"].get("terminated") for c in status.get("containerStatuses") or ()]
    phase = status.get("phase")
    return (
        _job_uid(pod),
        pod["metadata"].get("deletionTimestamp"),
        phase if phase in ("Succeeded", "Failed") else "",
        [state for state in ended if state],
    )


def _without_version(pod: Json) -> Json:
    return pod | {"metadata": pod["metadata"] | {"resourceVersion": ""}}


def _version(obj: Json) -> int:
    return _number(obj["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """resourceVersions of one kind compare as numbers (documented since Kubernetes 1.35, true long before)."""
    return int(version) if version.isdecimal() else 0
