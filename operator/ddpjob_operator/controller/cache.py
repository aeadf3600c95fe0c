"""The cached jobs, pods, Services, NetworkPolicies and claims.

Watch events, LISTs and responses to the operator's own writes update the cache in any order: the newer resourceVersion
wins, and a deleted object stays deleted if an older response arrives later. Of pods it keeps the views, of jobs their
encoded form (``stored_jobs``), of other objects the fields that plans read.

A change calls ``on_change`` with the key of the object's job. A pod's step towards Running calls ``on_update`` instead,
because a thousand pods take such steps within seconds and no decision waits for them. So does an edit of a job,
Service or NetworkPolicy, because a tenant may edit them many times a second, but not an admission or an eviction by
Kueue. A change that view or encoded form do not show calls nothing. A pod that ends or is deleted calls ``on_freed``
with the key of its job and its attempt.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import PodView
from ddpjob.engine.observed import Elder
from ddpjob_operator.controller.entries import (
    Entry,
    Place,
    end_of,
    entry_of,
    has_lost_label,
    is_foreign,
    is_same,
    owner_of,
    verdicts,
    version_number,
)
from ddpjob_operator.controller.partial_jobs import PartialJobs
from ddpjob_operator.controller.stored_jobs import restored

K = TypeVar("K")
V = TypeVar("V")

MAX_TOMBSTONES = 20_000  # several minutes at the highest rate; no response is older
MAX_SHARING = 16
"""How many jobs on one claim and subPath are woken by each other's pods, to show at once that they share it."""
WATCHED = (names.DDPJOBS, names.PODS, names.SERVICES, names.NETWORK_POLICIES)
"""Kinds whose changes come as watch events, besides PodGroups; claims are only listed by the sweep."""


class _Index(dict[tuple[str, str], dict[K, V]]):
    """Values in groups, each by its key. A group without values is not kept."""

    def of(self, namespace: str, name: str) -> dict[K, V]:
        return self.get((namespace, name), {})

    def add(self, group: tuple[str, str], key: K, value: V) -> None:
        self.setdefault(group, {})[key] = value

    def discard(self, group: tuple[str, str], key: K) -> None:
        values = self.get(group, {})
        values.pop(key, None)
        if not values:
            self.pop(group, None)


class Cache:
    """The cached objects of all kinds that plans read. Used from the event loop only, except ``count_states``."""

    def __init__(
        self,
        on_change: Callable[[Key], None] = lambda key: None,
        on_update: Callable[[Key], None] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._on_change = on_change
        self.on_freed: Callable[[Key, int], None] = lambda key, attempt: None
        self._on_update = on_update or on_change
        self._objects: dict[Resource, dict[Place, Entry]] = {
            resource: {} for resource in (*WATCHED, names.CLAIMS, *names.SCHEDULING_KINDS)
        }
        self._partial_jobs = PartialJobs(on_change, now)
        self._newest = dict.fromkeys(self._objects, 0)
        self._groups_of = _Index[tuple[Resource, str], Json]()  # by namespace and uid of the job
        self._pods_of = _Index[Place, PodView]()
        self._pods_named = _Index[Place, PodView]()
        self._pods_on = _Index[Place, PodView]()  # by namespace and claim, as the next two
        self._jobs_on = _Index[Key, None]()
        self._claims: dict[Key, Place] = {}
        # The last version of each deleted object; None: no version of it can follow.
        self._tombstones: OrderedDict[str, int | None] = OrderedDict()
        self.served: frozenset[str] | None = None
        """The API versions of PodGroups and Workloads that the API server serves; None before it was asked."""

    def job(self, key: Key) -> Json | None:
        """Return the cached job, or None. Each call decodes it."""
        found = self.get(names.DDPJOBS, *key)
        return None if found is None else restored(found)

    def job_uid(self, key: Key) -> str | None:
        """Return the uid of the cached job, or None."""
        entry = self._objects[names.DDPJOBS].get(key)
        return entry.uid if entry is not None else None

    def pods(self, namespace: str, uid: str) -> list[PodView]:
        """Return the pods of a namespace that have the label of the job with this uid.

        A pod elsewhere is no pod of the job, although its user may have copied label and owner reference.
        """
        return list(self._pods_of.of(namespace, uid).values())

    def former_pods(self, key: Key, uid: str, claim: str = "") -> list[PodView]:
        """Return the pods of other jobs that may still save where the job with this key and uid reads.

        They are of an attempt, and have the label of its name, or its claim (``claim_in_use``). Those of a job that
        exists run on, unless they are being deleted.
        """
        found = self._pods_named.of(*key) | (self._pods_on.of(key.namespace, claim) if claim else {})
        others = {place: pod for place, pod in found.items() if pod.attempt and uid not in (pod.job_uid, pod.owner_uid)}
        return [pod for place, pod in others.items() if pod.deleting or not self._has_job(place, pod)]

    def _has_job(self, place: Place, pod: PodView) -> bool:
        job = self._objects[names.PODS][place].job
        return job is not None and pod.owner_uid is not None and self.job_uid(job) == pod.owner_uid

    def sharing(self, key: Key, claim: str) -> list[str]:
        """Return the names of other jobs whose pods run with this claim, and wake the job when that changes.

        claim: ``claim_in_use`` of the job with this key.
        """
        place = key.namespace, claim
        if self._claims.get(key) != place:
            self._leave_claim(key)
        if not claim or self.job_uid(key) is None:  # deleted while its plan was made
            return []
        self._claims[key] = place
        self._jobs_on.add(place, key, None)
        return sorted(other.name for other in self._jobs_on.of(*place) if other != key and self._runs(other))

    def _may_wait(self, key: Key) -> bool:
        """Whether the first attempt of a job may wait for pods of others."""
        entry = self._objects[names.DDPJOBS].get(key)
        is_new = entry is not None and entry.value.state not in ("Succeeded", "Failed", "Suspended")
        return is_new and not self._pods_of.of(key.namespace, self.job_uid(key) or "")

    def _runs(self, key: Key) -> bool:
        pods = self._pods_of.of(key.namespace, self.job_uid(key) or "")
        return any(not (pod.ended or pod.deleting) for pod in pods.values())

    def groups(self, namespace: str, uid: str) -> dict[Resource, list[Json]]:
        """Return the PodGroups by kind whose owner is the job with this uid."""
        found: dict[Resource, list[Json]] = {}
        for (resource, _), group in self._groups_of.of(namespace, uid).items():
            found.setdefault(resource, []).append(group)
        return found

    def elder(self, key: Key) -> Elder | None:
        """Return the eldest partial job if it is elder than the partial or yielded job with this key."""
        return self._partial_jobs.elder(key)

    def get(self, resource: Resource, namespace: str, name: str) -> Any:
        """Return the value of an entry, or None."""
        entry = self._objects[resource].get((namespace, name))
        return entry.value if entry is not None else None

    def entries(self, resource: Resource) -> list[Entry]:
        """Return what is cached of all objects of a kind."""
        return list(self._objects[resource].values())

    def count_states(self) -> Mapping[str, float]:
        """Return the number of jobs by ``status.state``, for the metrics."""
        jobs = self.entries(names.DDPJOBS)  # a copy: another thread reads the metrics
        return Counter(job.value.state for job in jobs)

    def take(self, resource: Resource, event: Mapping[str, Any]) -> None:
        """Apply a watch event with ``type`` and ``object``, as the API server sends it."""
        obj = event["object"]
        if event["type"] == "DELETED":
            meta = obj["metadata"]
            version = version_number(meta.get("resourceVersion", ""))
            self.remove(resource, meta["namespace"], meta["name"], meta["uid"], version=version or None)
        else:
            self.put(resource, obj)

    def put(self, resource: Resource, obj: Json, *, wake: bool = True, same_version: bool = False) -> bool:
        """Store an object unless the cached one is newer; return whether the cache changed.

        wake: False does not queue the job of an object that is not a pod.
        same_version: replace an object of the same version, too.
        """
        meta = obj["metadata"]
        uid, place = meta["uid"], (meta["namespace"], meta["name"])
        known = self._objects[resource].get(place)
        if known is None and resource is names.WORKLOADS and is_foreign(meta):
            return False
        oldest = known.version + (not same_version) if known is not None else 0
        version = version_number(meta.get("resourceVersion", ""))
        is_deleted = self._is_deleted(uid, version)
        if is_deleted and self._tombstones[uid] is not None and has_lost_label(resource, meta):
            is_deleted = False  # watch and LIST show it as deleted, in any later version; the sweep finds out if it is
        if is_deleted or version < oldest:
            return False
        self._tombstones.pop(uid, None)
        if known is not None and known.uid != uid:
            self._drop(resource, known)
            known = None
        entry = self._objects[resource][place] = entry_of(resource, obj)
        self._newest[resource] = max(self._newest[resource], entry.version)
        if resource in names.SCHEDULING_KINDS:
            if known is not None:
                self._groups_of.discard(owner_of(known), (resource, known.name))
            self._groups_of.add(owner_of(entry), (resource, entry.name), entry.value)
        if resource is names.DDPJOBS:
            self._partial_jobs.observe(Key(*place), obj)
        if resource is names.PODS:
            self._put_pod(place, entry, known)
        elif wake:
            self._wake_after_edit(resource, entry, known)
        return True

    def _wake_after_edit(self, resource: Resource, entry: Entry, known: Entry | None) -> None:
        is_verdict = resource is names.WORKLOADS and known is not None and verdicts(entry) != verdicts(known)
        if known is None or is_verdict:
            self._wake(entry)
        elif entry.job is not None and not is_same(resource, entry.value, known.value):
            self._on_update(entry.job)

    def _put_pod(self, place: Place, entry: Entry, known: Entry | None) -> None:
        pod = entry.value
        if known is not None and (known.value.job_uid, known.job) != (pod.job_uid, entry.job):
            self._leave_job(place, known)
        self._pods_of.add((place[0], pod.job_uid), place, pod)
        if entry.job is not None:
            self._pods_named.add(entry.job, place, pod)
        if pod.claim:
            self._pods_on.add((place[0], pod.claim), place, pod)
        if known is not None and pod.stopped and not known.value.stopped:
            self._free(entry)
        if known is None or end_of(pod) != end_of(known.value):
            self._wake(entry)
        elif pod != known.value and entry.job is not None:
            self._on_update(entry.job)

    def _free(self, entry: Entry) -> None:
        """Say that a pod uses no quota any more."""
        if entry.job is not None:
            self.on_freed(entry.job, entry.value.attempt)

    def _leave_job(self, place: Place, entry: Entry) -> None:
        """Remove a pod from those of its job."""
        self._pods_of.discard((place[0], entry.value.job_uid), place)
        if entry.job is not None:
            self._pods_named.discard(entry.job, place)
        self._pods_on.discard((place[0], entry.value.claim), place)

    def _leave_claim(self, key: Key) -> None:
        """Remove a job from those with its claim."""
        if (used := self._claims.pop(key, None)) is not None:
            self._jobs_on.discard(used, key)

    def remove(self, resource: Resource, namespace: str, name: str, uid: str, *, version: int | None = None) -> bool:
        """Remove the object with this uid; return whether it was cached.

        version: of the watch event or the LIST that shows no such object. A later version may follow, because an object
        also disappears from a watch and a LIST when a user removes the label that they select.
        """
        self._add_tombstone(uid, version)
        place = namespace, name
        known = self._objects[resource].get(place)
        if known is None or known.uid != uid:
            return False
        self._drop(resource, known, version)
        self._wake(known)
        return True

    def _is_deleted(self, uid: str, version: int) -> bool:
        if uid not in self._tombstones:
            return False
        last = self._tombstones[uid]
        return last is None or version <= last

    def newest(self, resource: Resource) -> int:
        """Return the highest version of a kind that was stored. A LIST that is sent now has at least this version."""
        return self._newest[resource]

    def contradicts(self, resource: Resource, obj: Json, listed: int) -> bool:
        """Return whether an object of a LIST of version ``listed`` is older than what was seen up to that version.

        Then versions went back and have been used again since.
        """
        meta = obj["metadata"]
        known = self._objects[resource].get((meta["namespace"], meta["name"]))
        seen = known.version if known is not None and known.uid == meta["uid"] else self._tombstones.get(meta["uid"])
        return seen is not None and version_number(meta.get("resourceVersion", "")) < seen <= listed

    def wake_job_of(self, resource: Resource, namespace: str, name: str) -> None:
        """Queue the job of an object."""
        if (entry := self._objects[resource].get((namespace, name))) is not None:
            self._wake(entry)

    def wake_jobs(self) -> None:
        """Queue all jobs, because something changed that concerns each."""
        for entry in self.entries(names.DDPJOBS):
            self._wake(entry)

    def _wake(self, entry: Entry) -> None:
        if entry.job is not None:
            self._on_change(entry.job)
        claim = entry.value.claim if isinstance(entry.value, PodView) else ""
        others = self._jobs_on.of(entry.namespace, claim) if claim else {}
        for key in others:
            # For a job with pods this changes only the name in a message.
            if key != entry.job and (len(others) <= MAX_SHARING or self._may_wait(key)):
                self._on_change(key)

    def _drop(self, resource: Resource, entry: Entry, version: int | None = None) -> None:
        place = (entry.namespace, entry.name)
        self._objects[resource].pop(place, None)
        if resource is names.DDPJOBS:
            self._partial_jobs.observe(Key(*place), None)
            self._leave_claim(Key(*place))
        if resource is names.PODS:
            self._leave_job(place, entry)
            if not entry.value.stopped:
                self._free(entry)
        if resource in names.SCHEDULING_KINDS:
            self._groups_of.discard(owner_of(entry), (resource, entry.name))
        self._add_tombstone(entry.uid, version)

    def _add_tombstone(self, uid: str, version: int | None) -> None:
        self._tombstones[uid] = version
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
