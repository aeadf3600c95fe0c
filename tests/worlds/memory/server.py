"""The in-memory cluster: the API server's request handlers, and the ``Cluster`` protocol around them.

``ApiServer`` is synchronous and takes the steps of each request in the order of kube-apiserver. ``MemoryCluster`` adds
watches and garbage collection in the background.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob_operator.cluster.base import Page
from tests.worlds.memory import api_errors
from tests.worlds.memory.garbage import Collector
from tests.worlds.memory.kinds import Claims, Events, Jobs, Kind, NetworkPolicies, Pods, Services, restore
from tests.worlds.memory.selectors import Matcher, field_matcher, label_matcher
from tests.worlds.memory.store import Change, Store, clone
from tests.worlds.memory.watch import Watch

_OTHER_NAMESPACE = "the namespace of the provided object does not match the namespace sent on the request"

# Only the API server sets these; what a client writes in them on create is ignored.
_SYSTEM_FIELDS = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "generation",
)

PAGE_SIZE = 500
KINDS: tuple[type[Kind], ...] = (Jobs, Pods, Services, NetworkPolicies, Claims, Events)
RESOURCES = tuple(kind.resource for kind in KINDS)

Clock = Callable[[], datetime]


class ApiServer:
    """The verbs of ``Cluster``, synchronous. Bodies must be JSON; returned objects are copies."""

    def __init__(self, on_change: Callable[[Change], None], clock: Clock, new_uid: Callable[[], str]) -> None:
        self.store = Store(on_change)
        self.namespaces: set[str] = {"default"}
        self.terminating: set[str] = set()
        self.mutate: Callable[[Resource, Json], None] = lambda resource, obj: None
        """A mutating admission webhook: it may change an object that is about to be created."""
        self.logs: dict[tuple[str, str, str], str] = {}
        """What containers logged, by namespace, pod and container: who acts as a kubelet writes it."""
        self.ambiguous_patches = 0
        """Accepted patches that name a version which stood for another state before the objects were renumbered."""
        self._clock = clock
        self._new_uid = new_uid
        self._kinds: Mapping[Resource, Kind] = {kind.resource: kind() for kind in KINDS}

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        kind = self._kinds[resource]
        sent = as_sent(body)
        self.mutate(resource, sent)
        obj = kind.read_new(sent)
        meta = obj["metadata"]
        if meta.setdefault("namespace", namespace) != namespace:
            raise api_errors.bad_request(_OTHER_NAMESPACE)
        name = meta.get("name", "")
        self._admit(resource, namespace, name)
        for key in _SYSTEM_FIELDS:
            meta.pop(key, None)
        kind.prepare_create(obj)
        meta |= {"uid": self._new_uid(), "creationTimestamp": timestamp(self._clock())}
        if causes := kind.check_create(obj):
            raise api_errors.invalid(resource, name, causes, kind=obj["kind"])
        if meta.get("resourceVersion"):
            raise api_errors.internal("resourceVersion should not be set on objects to be created")
        existing = self.store.get(resource, namespace, name)
        if existing is not None:
            leaving = "deletionTimestamp" in existing["metadata"]
            raise api_errors.already_exists(resource, name, being_deleted=leaving)
        return clone(self.store.put(resource, obj))

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return clone(self._stored(resource, namespace, name))

    def read_log(self, namespace: str, pod: str, container: str, *, lines: int, limit: int) -> str:
        if not self._stored(names.PODS, namespace, pod)["spec"].get("nodeName"):
            return ""
        last = self.logs.get((namespace, pod, container), "").splitlines(keepends=True)[-lines:]
        return "".join(last).encode()[:limit].decode(errors="replace")

    def list(self, resource: Resource, namespace: str | None = None, *selectors: str | None, **named: Any) -> Page:
        matches = self.matcher(resource, *selectors, **named)
        items = tuple(clone(obj) for obj in self.store.all(resource, namespace) if matches(obj))
        return Page(items, str(self.store.version))

    def matcher(
        self, resource: Resource, label_selector: str | None = None, field_selector: str | None = None
    ) -> Matcher:
        by_label, by_field = label_matcher(label_selector), field_matcher(field_selector)
        return lambda obj: by_label(obj) and by_field(obj)

    def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        return self._update(resource, namespace, name, body, of_status=False)

    def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        if not self._kinds[resource].has_status:
            raise api_errors.no_such_subresource()
        return self._update(resource, namespace, name, body, of_status=True)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Json:
        obj = self._stored(resource, namespace, name)
        meta, kind = obj["metadata"], self._kinds[resource]
        if uid is not None and uid != meta["uid"]:
            raise api_errors.wrong_uid(resource, name, uid, meta["uid"])
        marked = self._marked(kind, obj, grace_seconds)
        if marked != obj:
            marked = self.store.put(resource, marked)
        if marked["metadata"].get("finalizers") or marked["metadata"].get("deletionGracePeriodSeconds", 0) > 0:
            return clone(marked)
        last = self.store.remove(resource, marked)
        return clone(last) if kind.returns_deleted else api_errors.deleted(resource, name, meta["uid"])

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Place a pod on a node, as a scheduler does by POST to its subresource ``binding``."""
        pod = self._stored(names.PODS, namespace, name)
        if "deletionTimestamp" in pod["metadata"]:
            raise api_errors.not_bindable(name, f"pod {name} is being deleted, cannot be assigned to a host")
        if assigned := pod["spec"].get("nodeName"):
            raise api_errors.not_bindable(name, f'pod {name} is already assigned to node "{assigned}"')
        conditions = [c for c in pod["status"].get("conditions", ()) if c["type"] != "PodScheduled"]
        placed = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        conditions.append(placed | {"lastTransitionTime": timestamp(self._clock())})
        status = pod["status"] | {"conditions": conditions}
        self.store.put(names.PODS, pod | {"spec": pod["spec"] | {"nodeName": node}, "status": status})

    def _marked(self, kind: Kind, obj: Json, requested: int | None) -> Json:
        """Return ``obj`` with deletionTimestamp set, or unchanged if it can be removed at once."""
        meta = obj["metadata"]
        before: int | None = meta.get("deletionGracePeriodSeconds")
        seconds = kind.grace_seconds(obj, requested)
        if seconds is None:
            if not meta.get("finalizers") or "deletionTimestamp" in meta:
                return obj
            seconds = 0
        elif "deletionTimestamp" in meta and before is not None:
            # A deletion under way can only be shortened.
            if requested is None or requested >= before:
                return obj
            began = datetime.fromisoformat(meta["deletionTimestamp"]) - timedelta(seconds=before)
            return self._ending(obj, began, requested)
        generation = {"generation": meta["generation"] + 1} if "generation" in meta else {}
        return self._ending(obj | {"metadata": meta | generation}, self._clock(), seconds)

    def _ending(self, obj: Json, began: datetime, seconds: int) -> Json:
        end = {
            "deletionTimestamp": timestamp(began + timedelta(seconds=seconds)),
            "deletionGracePeriodSeconds": seconds,
        }
        return obj | {"metadata": obj["metadata"] | end}

    def _update(self, resource: Resource, namespace: str, name: str, body: Json, *, of_status: bool) -> Json:
        kind, old = self._kinds[resource], self._stored(resource, namespace, name)
        patch = as_sent(body)
        new = kind.read_patched(merge_patch(old, patch), old)
        new["metadata"] = meta = dict(new["metadata"])
        self._compare_place(namespace, name, meta)
        self._compare_version(resource, meta, old["metadata"])
        self.ambiguous_patches += "resourceVersion" in (patch.get("metadata") or {}) and self.store.is_ambiguous(old)
        _keep_system_fields(meta, old["metadata"])
        (kind.prepare_status if of_status else kind.prepare_update)(new, old)
        causes = (kind.check_status if of_status else kind.check_update)(new, old)
        if causes:
            # A patch may have changed the kind; the error then contains the new one.
            given = Resource(new.get("apiVersion", ""), new.get("kind", ""), resource.plural)
            raise api_errors.invalid(given, name, causes)
        if new == old:
            return clone(old)
        meta = new["metadata"]
        if "deletionTimestamp" in meta and not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds"):
            self.store.remove(resource, old)
            return clone(new)
        return clone(self.store.put(resource, new))

    def _compare_place(self, namespace: str, name: str, meta: Json) -> None:
        """Raise ``Invalid`` if a patch changed the name or the namespace of the object."""
        if (given := meta.get("name")) != name:
            raise api_errors.bad_request(f"the name of the object ({given}) does not match the URL ({name})")
        if meta.setdefault("namespace", namespace) != namespace:
            raise api_errors.bad_request(_OTHER_NAMESPACE)

    def _compare_version(self, resource: Resource, meta: Json, old: Json) -> None:
        """Raise ``Conflict`` if the request names another version than the stored one. It need not name any."""
        current, wanted = old["resourceVersion"], meta.get("resourceVersion", "")
        if wanted in ("", "0"):
            if self._kinds[resource].needs_version:
                cause = api_errors.Cause("metadata.resourceVersion", "must be specified for an update")
                raise api_errors.invalid(resource, old["name"], [cause], kind=resource.plural)
        elif not wanted.isdecimal():
            raise api_errors.internal(f'strconv.ParseUint: parsing "{wanted}": invalid syntax')
        elif wanted != current:
            raise api_errors.modified(resource, old["name"])
        meta["resourceVersion"] = current

    def _admit(self, resource: Resource, namespace: str, name: str) -> None:
        if namespace in self.terminating:
            raise api_errors.namespace_terminating(resource, name, namespace)
        if namespace not in self.namespaces:
            raise api_errors.namespace_not_found(namespace)

    def _stored(self, resource: Resource, namespace: str, name: str) -> Json:
        obj = self.store.get(resource, namespace, name)
        if obj is None:
            raise api_errors.not_found(resource, name)
        return obj


def _verb(name: str) -> Callable[..., Awaitable[Any]]:
    async def carry_out(self: "MemoryCluster", *arguments: Any, **options: Any) -> Any:
        return await self.request(name, *arguments, **options)

    return carry_out


class MemoryCluster:
    """The ``Cluster`` that tests run on, with watches and with the actions of an administrator.

    ``server`` has the same verbs, synchronous, for the code that acts as user, scheduler or kubelet. ``store`` has the
    objects and their history, and is read only.

    clock, new_uid: return the time and a new uid.
    collects: collect garbage after each request that makes some; if False, only ``collect`` does.
    """

    def __init__(
        self,
        *,
        clock: Clock = lambda: datetime.now(UTC),
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
        collects: bool = True,
    ) -> None:
        self._watches: list[Watch] = []
        self.server = ApiServer(self._on_change, clock, new_uid)
        self.store = self.server.store
        self._collector = Collector(self.server)
        self._collects = collects
        self._due: asyncio.Handle | None = None

    create, get, delete, patch, patch_status, read_log = map(
        _verb, ("create", "get", "delete", "patch", "patch_status", "read_log")
    )

    async def request(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Carry out a verb of ``server``. Other tasks run first, as they do during a real request."""
        await asyncio.sleep(0)
        return getattr(self.server, verb)(*arguments, **options)

    async def pages(self, resource: Resource, *arguments: Any, **selectors: Any) -> AsyncIterator[Page]:
        """Yield the objects as they are now; requests between two pages do not change the LIST."""
        await asyncio.sleep(0)
        whole = self.server.list(resource, *arguments, **selectors)
        for start in range(0, max(len(whole.items), 1), PAGE_SIZE):
            yield Page(whole.items[start : start + PAGE_SIZE], whole.resource_version, start == 0)
            await asyncio.sleep(0)

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str | None = None,
        *,
        resource_version: str | None = None,
    ) -> Watch:
        """Watch changes after ``resource_version``, or all present objects and then changes.

        Raises ``ClusterError`` with code 410 if the version is older than the history.
        """
        watch = Watch(resource, namespace, self.server.matcher(resource, label_selector))
        if resource_version in (None, "", "0"):
            watch.start_with(self.store.all(resource))
        else:
            since = int(str(resource_version))
            if since < self.store.oldest:
                raise api_errors.expired(since, self.store.oldest)
            for change in self.store.changes_after(since):
                watch.offer(change)
        self._watches = [other for other in self._watches if not other.closed] + [watch]
        return watch

    def create_namespace(self, name: str) -> None:
        """Create a namespace. ``default`` exists from the start."""
        self.server.namespaces.add(name)

    def delete_namespace(self, name: str) -> None:
        """Begin to delete a namespace: nothing can be created in it, and its objects are deleted."""
        self.server.terminating.add(name)
        self._collect_soon()

    def collect(self) -> int:
        """Run the garbage collector now. Return the number of its requests."""
        return self._collector.run()

    def _on_change(self, change: Change) -> None:
        for watch in self._watches:
            watch.offer(change)
        is_claim = change.resource is names.CLAIMS
        if change.type == "DELETED" or is_claim or "ownerReferences" in change.obj["metadata"]:
            self._collect_soon()

    def _collect_soon(self) -> None:
        """Collect in the next iteration of the loop: as in a cluster, garbage outlives the request that made it."""
        if not self._collects or self._due is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # without a loop only ``collect`` collects
        self._due = loop.call_soon(self._collect_now)

    def _collect_now(self) -> None:
        self._due = None
        self._collector.run()


def _keep_system_fields(new: Json, old: Json) -> None:
    """Restore the system fields of metadata that an update must not change or has left out."""
    for key in ("creationTimestamp", "generation"):
        restore(new, old, key)
    if "deletionTimestamp" in old:
        new["deletionTimestamp"] = old["deletionTimestamp"]
    for key in ("uid", "deletionGracePeriodSeconds"):
        if key in old:
            new.setdefault(key, old[key])


def merge_patch(target: Any, patch: Any) -> Any:
    """Return ``target`` with an RFC 7396 merge patch applied. Unchanged parts are shared with ``target``."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge_patch(out.get(key), value)
    return out


def as_sent(body: Json) -> Json:
    """Return a body as it would arrive over HTTP: a copy, as JSON. Raises ``ValueError`` for NaN."""
    value = json.loads(json.dumps(body, allow_nan=False))
    if not isinstance(value, dict):
        raise api_errors.bad_request(f"error decoding: expected a JSON object, not {type(value).__name__}")
    arrived: Json = value
    return arrived
