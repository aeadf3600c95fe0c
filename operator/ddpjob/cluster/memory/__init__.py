"""An API server inside the process: the ``Cluster`` that local mode runs on and that tests hold the operator against.

It answers as kube-apiserver with its garbage collector does, for the kinds and verbs that this project uses, and
``tests/cluster/contract`` sends both the same random requests to prove it. It has: one counter of versions, uids,
optimistic concurrency, merge patches, the status subresource, generations, strict decoding and defaults of all five
kinds, the CRD's schema and CEL rules, label and field selectors, watches with history and 410, preconditions,
graceful deletion, finalizers, background collection of owned objects, claims in use, namespaces that go away.

What it does not do:

* other kinds, other verbs (update, apply, deletecollection), other subresources, other patch types;
* ``generateName``, ``managedFields``, dry runs, paging, bookmarks, foreground and orphaning deletion;
* authentication, RBAC, quota, LimitRanges, Pod Security and other admission; service accounts, priority classes and
  runtime classes are taken to exist; no token volume is mounted;
* Services with an address, binding of claims, scheduling, and running anything: that is a kubelet's;
* checks of pod fields beyond ``podchecks.py``: of others only name and type are checked, as the installed
  Kubernetes client knows them;
* the prose of refusals: class, code, fields and reasons are the API server's, most explanations are not;
* Events do not expire.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.cluster.base import Json, ObjectList
from ddpjob.cluster.memory import answers
from ddpjob.cluster.memory.api import ApiServer, Clock, random_uid, system_clock
from ddpjob.cluster.memory.faults import Call, Fault, Hook, Verb, lost_answer
from ddpjob.cluster.memory.garbage import Collector
from ddpjob.cluster.memory.store import Change, Store
from ddpjob.cluster.memory.watching import Watch, Watches, WatchEvent

__all__ = ["Call", "Change", "Fault", "MemoryCluster", "Store", "Watch", "WatchEvent", "lost_answer"]

T = TypeVar("T")
_RESOURCES = {r.plural: r for r in (names.DDPJOBS, names.PODS, names.SERVICES, names.CLAIMS, names.EVENTS)}


class MemoryCluster:
    """Verbs of ``Cluster``, a watch, and what an administrator or a test does to a cluster.

    ``server`` has the same verbs without waiting and without faults, for whoever plays user, scheduler or kubelet.

    clock, new_uid: where times and uids come from; both may be made deterministic.
    hook: asked about every call, see ``faults``.
    collects: collect garbage by itself, right after the request that made it; otherwise only in ``collect``.
    """

    def __init__(
        self,
        *,
        clock: Clock = system_clock,
        new_uid: Callable[[], str] = random_uid,
        hook: Hook | None = None,
        collects: bool = True,
    ) -> None:
        self.hook = hook
        self.watches = Watches()
        self.server = ApiServer(self._on_change, clock, new_uid)
        self._collector = Collector(self.server.store, self.server, self.server.terminating)
        self._collects = collects
        self._due: asyncio.Handle | None = None
        self._calls = 0

    @property
    def store(self) -> Store:
        """The objects themselves and their history, to look at: read only."""
        return self.server.store

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        name = str((body.get("metadata") or {}).get("name", ""))
        call = self._call("create", resource, namespace, name, body)
        return await self._carry_out(call, lambda: self.server.create(resource, namespace, body))

    async def get(self, resource: Resource, namespace: str, name: str) -> Json:
        call = self._call("get", resource, namespace, name)
        return await self._carry_out(call, lambda: self.server.get(resource, namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> ObjectList:
        call = self._call("list", resource, namespace, "")
        return await self._carry_out(
            call, lambda: self.server.list(resource, namespace, label_selector, field_selector)
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Json:
        call = self._call("delete", resource, namespace, name)
        return await self._carry_out(
            call, lambda: self.server.delete(resource, namespace, name, uid=uid, grace_seconds=grace_seconds)
        )

    async def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        call = self._call("patch", resource, namespace, name, body)
        return await self._carry_out(call, lambda: self.server.patch(resource, namespace, name, body))

    async def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        call = self._call("patch_status", resource, namespace, name, body)
        return await self._carry_out(call, lambda: self.server.patch_status(resource, namespace, name, body))

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        *,
        resource_version: str | None = None,
    ) -> Watch:
        """Changes after ``resource_version`` (of a LIST), or everything there is and then changes.

        Raises ``ClusterError`` with code 410 when that version is older than the history.
        """
        store = self.server.store
        watch = Watch(resource, namespace, self.server.matcher(resource, label_selector, field_selector))
        if resource_version in (None, "", "0"):
            watch.start_with(store.all(resource))
        else:
            since = int(str(resource_version))
            if since < store.oldest:
                raise answers.expired(since, store.oldest)
            for change in store.changes_after(since):
                watch.offer(change)
        self.watches.add(watch)
        return watch

    def create_namespace(self, name: str) -> None:
        """A new namespace; ``default`` is there from the start."""
        self.server.namespaces.add(name)

    def delete_namespace(self, name: str) -> None:
        """Begin to delete a namespace: nothing can be created in it, and what it holds is collected."""
        self.server.terminating.add(name)
        self._collect_soon()

    def collect(self) -> int:
        """Do now what the garbage collector would do in a moment; the number of its requests."""
        return self._collector.run()

    def forget_history(self) -> None:
        """Watches from a version before now get 410 from here on."""
        self.server.store.compact()

    def dump(self) -> Json:
        """All objects and namespaces, as JSON."""
        return self.server.store.dump() | {"namespaces": sorted(self.server.namespaces)}

    def load(self, dumped: Json) -> None:
        """Go on from what ``dump`` gave, in place of what is here. Raises ``KeyError`` for an unknown kind."""
        self.server.store.load(dumped, _RESOURCES)
        self.server.namespaces |= set(dumped["namespaces"])
        self._collect_soon()

    def _call(self, verb: Verb, resource: Resource, namespace: str | None, name: str, body: Json | None = None) -> Call:
        self._calls += 1
        return Call(self._calls, verb, resource, namespace, name, body)

    async def _carry_out(self, call: Call, act: Callable[[], T]) -> T:
        fault = (self.hook(call) if self.hook else None) or Fault()
        # Even without a delay others get their turn here, as they would during a request.
        await asyncio.sleep(fault.delay)
        if fault.before is not None:
            raise fault.before
        answer = act()
        if fault.after is not None:
            raise fault.after
        return answer

    def _on_change(self, change: Change) -> None:
        self.watches.offer(change)
        is_claim = change.resource is names.CLAIMS
        if change.type == "DELETED" or is_claim or "ownerReferences" in change.obj["metadata"]:
            self._collect_soon()

    def _collect_soon(self) -> None:
        """Put off to the next turn of the loop: garbage outlives the request that made it, as it does in a cluster."""
        if not self._collects or self._due is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no loop, no background: ``collect`` is there
        self._due = loop.call_soon(self._collect_now)

    def _collect_now(self) -> None:
        self._due = None
        self._collector.run()
