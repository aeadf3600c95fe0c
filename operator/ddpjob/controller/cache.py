"""What the operator knows of the cluster: jobs, pods, services and claims as last seen.

Fed by watch events, by LISTs and by the answers to the operator's own writes, in whatever order they come:
the newer resourceVersion wins, and a deleted object stays deleted however late an old answer arrives.
Every real change calls ``on_change`` with the key of the job that it concerns; a repetition changes nothing.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.base import ObjectList

MAX_TOMBSTONES = 20_000  # some minutes of the busiest churn; an answer older than that cannot come any more


WATCHED = (names.DDPJOBS, names.PODS)
"""Kinds whose changes come as watch events; the others are listed by the sweep."""


class Key(NamedTuple):
    """A job by its place: what the work queue holds and a reconcile is about."""

    namespace: str
    name: str


Place = tuple[str, str]
"""Namespace and name of any object."""


class Cache:
    """The objects of the kinds above. Synchronous and used from the event loop alone."""

    def __init__(self, on_change: Callable[[Key], None] = lambda key: None) -> None:
        self._on_change = on_change
        self._objects: dict[Resource, dict[Place, Json]] = {
            resource: {} for resource in (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS)
        }
        self._pods_of: dict[str, dict[Place, Json]] = defaultdict(dict)
        self._buried: OrderedDict[str, None] = OrderedDict()

    def job(self, key: Key) -> Json | None:
        """The job as last seen."""
        return self._objects[names.DDPJOBS].get(key)

    def job_keys(self) -> tuple[Key, ...]:
        """All jobs."""
        return tuple(Key(*place) for place in self._objects[names.DDPJOBS])

    def pods(self, uid: str) -> list[Json]:
        """Pods that carry the label of the job with this uid."""
        return list(self._pods_of.get(uid, {}).values())

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Any cached object."""
        return self._objects[resource].get((namespace, name))

    def unlabelled(self, resource: Resource) -> list[Json]:
        """Objects that were adopted although they do not carry the operator's label: no LIST of ours shows them."""
        return [obj for obj in self._objects[resource].values() if not is_labelled(obj)]

    def count_states(self) -> dict[str, float]:
        """Number of jobs by ``status.state``, for the metrics."""
        jobs = list(self._objects[names.DDPJOBS].values())  # a copy: the metrics are asked for from another thread
        states = Counter(str((job.get("status") or {}).get("state") or "New") for job in jobs)
        return {state: float(number) for state, number in states.items()}

    def take(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """Take in a watch event: ``type`` and ``object``, as the API server sends it."""
        obj = event["object"]
        if event["type"] == "DELETED":
            meta = obj["metadata"]
            self.remove(resource, meta["namespace"], meta["name"], meta["uid"])
        else:
            self.put(resource, obj)

    def put(self, resource: Resource, obj: Json) -> bool:
        """Take in an object unless what is known is newer; returns whether that changed anything."""
        obj["metadata"].pop("managedFields", None)  # half of a pod's size, and nobody here asks for it
        uid, place = obj["metadata"]["uid"], _place(obj)
        known = self._objects[resource].get(place)
        if uid in self._buried or (known is not None and not _is_newer(obj, known)):
            return False
        if known is not None and known["metadata"]["uid"] != uid:
            self._bury(resource, known)
        self._objects[resource][place] = obj
        if resource is names.PODS:
            if known is not None and _job_uid(known) != _job_uid(obj):
                self._pods_of[_job_uid(known)].pop(place, None)
            self._pods_of[_job_uid(obj)][place] = obj
        self._wake(resource, obj)
        return True

    def remove(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """The object with this uid is gone for good; returns whether it was known."""
        self._remember_dead(uid)
        known = self._objects[resource].get((namespace, name))
        if known is None or known["metadata"]["uid"] != uid:
            return False
        self._bury(resource, known)
        self._wake(resource, known)
        return True

    def replace(self, resource: Resource, listed: ObjectList, covers: Callable[[Json], bool] = lambda obj: True) -> int:
        """Make the cache agree with a LIST; returns how many objects that changed.

        Known objects that ``covers`` says the LIST would have shown, and that are no newer than it, are gone.
        """
        changes = sum(self.put(resource, obj) for obj in listed.items)
        present = {obj["metadata"]["uid"] for obj in listed.items}
        limit = _number(listed.resource_version)
        for obj in list(self._objects[resource].values()):
            meta = obj["metadata"]
            if meta["uid"] in present or not covers(obj) or _version(obj) > limit:
                continue
            changes += self.remove(resource, meta["namespace"], meta["name"], meta["uid"])
        return changes

    def _wake(self, resource: Resource, obj: Json) -> None:
        if key := key_of(resource, obj):
            self._on_change(key)

    def _bury(self, resource: Resource, obj: Json) -> None:
        place, uid = _place(obj), obj["metadata"]["uid"]
        self._objects[resource].pop(place, None)
        if resource is names.PODS:
            siblings = self._pods_of.get(_job_uid(obj), {})
            siblings.pop(place, None)
            if not siblings:
                self._pods_of.pop(_job_uid(obj), None)
        self._remember_dead(uid)

    def _remember_dead(self, uid: str) -> None:
        self._buried[uid] = None
        while len(self._buried) > MAX_TOMBSTONES:
            self._buried.popitem(last=False)


def key_of(resource: Resource, obj: Mapping[str, Any]) -> Key | None:
    """The job an object belongs to, by its label; a job belongs to itself."""
    meta = obj["metadata"]
    if resource is names.DDPJOBS:
        return Key(meta["namespace"], meta["name"])
    name = (meta.get("labels") or {}).get(names.LABEL_JOB_NAME)
    return Key(meta["namespace"], name) if name else None


def is_labelled(obj: Mapping[str, Any]) -> bool:
    """Whether the operator's own label selector finds the object."""
    return (obj["metadata"].get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.MANAGED_BY


def _place(obj: Json) -> Place:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _job_uid(pod: Json) -> str:
    return str((pod["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, ""))


def _is_newer(obj: Json, known: Json) -> bool:
    return _version(obj) > _version(known)


def _version(obj: Json) -> int:
    return _number(obj["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """resourceVersions of one kind compare as numbers (documented since Kubernetes 1.35, true long before)."""
    return int(version) if version.isdecimal() else 0
