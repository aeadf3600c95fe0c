"""The cached jobs, pods, Services, NetworkPolicies and claims.

Watch events, LISTs and responses to the operator's own writes update the cache in any order: the newer resourceVersion
wins, and a deleted object stays deleted if an older response arrives later. Of pods it keeps the views, of jobs their
encoded form, of other objects the fields that plans read.

A change calls ``on_change`` with the key of the object's job. A pod's step towards Running calls ``on_update`` instead,
because a thousand pods take such steps within seconds and no decision waits for them. So does an edit of a job,
Service or NetworkPolicy, because a tenant may edit them many times a second, but not an admission or an eviction by
Kueue. A change that view or encoded form do not show calls nothing. A pod that ends or is deleted calls ``on_freed``
with the key of its job and its attempt.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json, owner_uid
from ddpjob.api.pod_view import PodView
from ddpjob.engine.observed import Elder
from ddpjob_operator.controller.entries import (
    Entry,
    end_of,
    entry_of,
    has_lost_label,
    is_same,
    owning_job,
    restored,
    verdicts,
    version_number,
)
from ddpjob_operator.controller.job_facts import JobFacts
from ddpjob_operator.controller.partial_jobs import PartialJobs

MAX_TOMBSTONES = 20_000  # several minutes at the highest rate; no response is older
MAX_SHARING = 16
"""How many jobs on one claim and subPath are woken by each other's pods, to show at once that they share it."""
WATCHED = (names.DDPJOBS, names.PODS, names.SERVICES, names.NETWORK_POLICIES)
"""Kinds whose changes come as watch events, besides PodGroups; claims are only listed by the sweep."""

_Group = tuple[str, str, str]
"""What some pods or groups have in common: label of the job's uid or name, claim, owner; namespace; its value."""


class _Index(dict[tuple[str, str, str], dict[Any, Any]]):
    """Values by what they have in common, and there each by its key. A group without values is not kept."""

    def of(self, kind: str, namespace: str, name: str) -> dict[Any, Any]:
        return self.get((kind, namespace, name), {})

    def move(self, key: Any, value: Any, before: Collection[_Group], after: Collection[_Group]) -> None:
        """Take a value out of the groups where it was, and put the new one into those where it is."""
        for group in before:
            if group not in after and key in self.get(group, {}):
                del self[group][key]
                if not self[group]:
                    del self[group]
        for group in after:
            self.setdefault(group, {})[key] = value


def _groups(resource: Resource, entry: Entry | None) -> list[_Group]:
    """Return where the index has an object."""
    if entry is None:
        return []
    if resource in names.SCHEDULING_KINDS:
        return [("owner", entry.namespace, owner_uid(entry.value) or "")]
    if resource is not names.PODS:
        return []
    pod = entry.value
    found = [("uid", entry.namespace, pod.job_uid)]
    found += [("name", *entry.job)] if entry.job is not None else []
    return found + ([("claim", entry.namespace, pod.claim)] if pod.claim else [])


class Cache:
    """The cached objects of all kinds that plans read. Used from the event loop only, except ``job_facts``."""

    def __init__(
        self,
        on_change: Callable[[Key], None] = lambda key: None,
        on_update: Callable[[Key], None] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._on_change = on_change
        self.on_freed: Callable[[Key, int], None] = lambda key, attempt: None
        self._on_update = on_update or on_change
        self._objects: dict[Resource, dict[tuple[str, str], Entry]] = {
            resource: {} for resource in (*WATCHED, names.CLAIMS, *names.SCHEDULING_KINDS)
        }
        self._partial_jobs = PartialJobs(on_change, now)
        self._newest = dict.fromkeys(self._objects, 0)
        self._index = _Index()
        self._claims: dict[Key, _Group] = {}
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
        return list(self._index.of("uid", namespace, uid).values())

    def former_pods(self, key: Key, uid: str, claim: str = "") -> list[PodView]:
        """Return the pods of other jobs that may still save where the job with this key and uid reads.

        They are of an attempt, and have the label of its name, or its claim (``claim_in_use``). Those of a job that
        exists run on, unless they are being deleted.
        """
        found = self._index.of("name", *key) | (self._index.of("claim", key.namespace, claim) if claim else {})
        others = [pod for pod in found.values() if pod.attempt and uid not in (pod.job_uid, pod.owner_uid)]
        return [pod for pod in others if pod.deleting or not self._has_job(key.namespace, pod)]

    def _has_job(self, namespace: str, pod: PodView) -> bool:
        job = self._objects[names.PODS][namespace, pod.name].job
        return job is not None and pod.owner_uid is not None and self.job_uid(job) == pod.owner_uid

    def sharing(self, key: Key, claim: str) -> list[str]:
        """Return the names of other jobs whose pods run with this claim, and wake the job when that changes.

        claim: ``claim_in_use`` of the job with this key.
        """
        place = "job", key.namespace, claim
        if self._claims.get(key) != place:
            self._leave_claim(key)
        if not claim or self.job_uid(key) is None:  # deleted while its plan was made
            return []
        self._claims[key] = place
        self._index.move(key, None, (), (place,))
        return sorted(other.name for other in self._index.of(*place) if other != key and self._runs(other))

    def _may_wait(self, key: Key) -> bool:
        """Whether the first attempt of a job may wait for pods of others."""
        entry = self._objects[names.DDPJOBS].get(key)
        is_new = entry is not None and entry.value.facts.state not in ("Succeeded", "Failed", "Suspended")
        return is_new and not self.pods(key.namespace, self.job_uid(key) or "")

    def _runs(self, key: Key) -> bool:
        pods = self.pods(key.namespace, self.job_uid(key) or "")
        return any(not (pod.ended or pod.deleting) for pod in pods)

    def groups(self, namespace: str, uid: str) -> dict[Resource, list[Json]]:
        """Return the PodGroups by kind whose owner is the job with this uid."""
        found: dict[Resource, list[Json]] = {}
        for (resource, _), group in self._index.of("owner", namespace, uid).items():
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

    def job_facts(self) -> list[tuple[str, str, JobFacts]]:
        """Return namespace, name and facts of all jobs. Called in another thread, too."""
        return [(job.namespace, job.name, job.value.facts) for job in self.entries(names.DDPJOBS)]

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
        if known is None and resource is names.WORKLOADS and owning_job(meta) is None:
            return False  # of another kind of job
        oldest = known.version + (not same_version) if known is not None else 0
        version = version_number(meta.get("resourceVersion", ""))
        last = self._tombstones.get(uid, -1)
        # Watch and LIST show an object without the label as deleted, in any later version; the sweep finds out.
        is_deleted = last is None or (version <= last and not has_lost_label(resource, meta))
        if is_deleted or version < oldest:
            return False
        self._tombstones.pop(uid, None)
        if known is not None and known.uid != uid:
            self._drop(resource, known)
            known = None
        entry = self._objects[resource][place] = entry_of(resource, obj)
        self._newest[resource] = max(self._newest[resource], entry.version)
        self._index.move((resource, entry.name), entry.value, _groups(resource, known), _groups(resource, entry))
        if resource is names.DDPJOBS:
            self._partial_jobs.observe(Key(*place), obj)
        if resource is names.PODS:
            self._wake_after_step(entry, known)
        elif wake:
            self._wake_after_edit(resource, entry, known)
        return True

    def _wake_after_edit(self, resource: Resource, entry: Entry, known: Entry | None) -> None:
        is_verdict = resource is names.WORKLOADS and known is not None and verdicts(entry) != verdicts(known)
        if known is None or is_verdict:
            self._wake(entry)
        elif entry.job is not None and not is_same(resource, entry.value, known.value):
            self._on_update(entry.job)

    def _wake_after_step(self, entry: Entry, known: Entry | None) -> None:
        pod = entry.value
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

    def _leave_claim(self, key: Key) -> None:
        """Remove a job from those with its claim."""
        if (used := self._claims.pop(key, None)) is not None:
            self._index.move(key, None, (used,), ())

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
        others = self._index.of("job", entry.namespace, claim) if claim else {}
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
        self._index.move((resource, entry.name), None, _groups(resource, entry), ())
        if resource is names.PODS and not entry.value.stopped:
            self._free(entry)
        self._add_tombstone(entry.uid, version)

    def _add_tombstone(self, uid: str, version: int | None) -> None:
        self._tombstones[uid] = version
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
