"""The request handlers: create, get, list, patch, delete, each in the order of steps of the real API server.

Synchronous and without faults; ``MemoryCluster`` puts the protocol, faults and background work around it.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.cluster.base import Json, ObjectList
from ddpjob.cluster.memory import answers, metadata
from ddpjob.cluster.memory.formats import timestamp
from ddpjob.cluster.memory.jobs import Jobs
from ddpjob.cluster.memory.kinds import Kind
from ddpjob.cluster.memory.metadata import SYSTEM_FIELDS
from ddpjob.cluster.memory.otherkinds import Claims, Events, Services
from ddpjob.cluster.memory.pods import Pods
from ddpjob.cluster.memory.selectors import Matcher, field_matcher, label_matcher
from ddpjob.cluster.memory.store import Change, Store, clone

_OTHER_NAMESPACE = "the namespace of the provided object does not match the namespace sent on the request"

Clock = Callable[[], datetime]


def system_clock() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def random_uid() -> str:
    """A uid that nobody else has."""
    return str(uuid.uuid4())


class ApiServer:
    """What is asked for must be JSON; what is answered is the caller's own copy."""

    def __init__(self, on_change: Callable[[Change], None], clock: Clock, new_uid: Callable[[], str]) -> None:
        self.store = Store(on_change)
        self.namespaces: set[str] = {"default"}
        self.terminating: set[str] = set()
        self._clock = clock
        self._new_uid = new_uid
        kinds: tuple[Kind, ...] = (Jobs(), Pods(), Services(), Claims(), Events())
        self._kinds: Mapping[Resource, Kind] = {kind.resource: kind for kind in kinds}

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        kind = self._kinds[resource]
        obj = kind.read_new(as_sent(body))
        meta = obj["metadata"]
        if meta.setdefault("namespace", namespace) != namespace:
            raise answers.bad_request(_OTHER_NAMESPACE)
        name = meta.get("name", "")
        self._admit(resource, namespace, name)
        for key in SYSTEM_FIELDS:
            meta.pop(key, None)
        kind.prepare_create(obj)
        meta |= {"uid": self._new_uid(), "creationTimestamp": timestamp(self._clock())}
        if causes := kind.check_create(obj):
            raise answers.invalid(resource, name, causes, kind=obj["kind"])
        if meta.get("resourceVersion"):
            raise answers.internal("resourceVersion should not be set on objects to be created")
        existing = self.store.get(resource, namespace, name)
        if existing is not None:
            leaving = "deletionTimestamp" in existing["metadata"]
            raise answers.already_exists(resource, name, being_deleted=leaving)
        return _copy(self.store.put(resource, obj))

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        return _copy(self._stored(resource, namespace, name))

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> ObjectList:
        matches = self.matcher(resource, label_selector, field_selector)
        items = tuple(_copy(obj) for obj in self.store.all(resource, namespace) if matches(obj))
        return ObjectList(items, str(self.store.version))

    def matcher(self, resource: Resource, label_selector: str | None, field_selector: str | None) -> Matcher:
        by_label, by_field = label_matcher(label_selector), field_matcher(resource, field_selector)
        return lambda obj: by_label(obj) and by_field(obj)

    def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        return self._update(resource, namespace, name, body, of_status=False)

    def patch_status(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        if not self._kinds[resource].has_status:
            raise answers.no_such_subresource()
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
            raise answers.wrong_uid(resource, resource.kind, name, uid, meta["uid"])
        marked = self._marked(kind, obj, grace_seconds)
        if marked != obj:
            marked = self.store.put(resource, marked)
        if marked["metadata"].get("finalizers") or marked["metadata"].get("deletionGracePeriodSeconds", 0) > 0:
            return _copy(marked)
        last = self.store.remove(resource, marked)
        return _copy(last) if kind.returns_deleted else answers.deleted(resource, name, meta["uid"])

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Place a pod on a node, as a scheduler does by POST to its subresource ``binding``."""
        pod = self._stored(names.PODS, namespace, name)
        if "deletionTimestamp" in pod["metadata"]:
            raise answers.unplaceable(name, f"pod {name} is being deleted, cannot be assigned to a host")
        if assigned := pod["spec"].get("nodeName"):
            raise answers.unplaceable(name, f'pod {name} is already assigned to node "{assigned}"')
        conditions = [c for c in pod["status"].get("conditions", ()) if c["type"] != "PodScheduled"]
        placed = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        conditions.append(placed | {"lastTransitionTime": timestamp(self._clock())})
        status = pod["status"] | {"conditions": conditions}
        self.store.put(names.PODS, pod | {"spec": pod["spec"] | {"nodeName": node}, "status": status})

    def _marked(self, kind: Kind, obj: Json, requested: int | None) -> Json:
        """The object as deletion leaves it for its kubelet or its finalizers to end; the same where nobody waits."""
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
        metadata.keep_system_fields(meta, old["metadata"])
        (kind.prepare_status if of_status else kind.prepare_update)(new, old)
        causes = (kind.check_status if of_status else kind.check_update)(new, old)
        if causes:
            # A patch may have changed them, and the answer then names what it made of the object.
            said = Resource(new.get("apiVersion", ""), new.get("kind", ""), resource.plural)
            raise answers.invalid(said, name, causes)
        if new == old:
            return _copy(old)
        meta = new["metadata"]
        if "deletionTimestamp" in meta and not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds"):
            self.store.remove(resource, old)
            return _copy(new)
        return _copy(self.store.put(resource, new))

    def _compare_place(self, namespace: str, name: str, meta: Json) -> None:
        """Whether the patched object is still the one that the request named."""
        if not meta.get("name"):
            message = f"the name of the object ({name} based on URL) was undeterminable: name must be provided"
            raise answers.bad_request(message)
        if meta["name"] != name:
            message = f"the name of the object ({meta['name']}) does not match the name on the URL ({name})"
            raise answers.bad_request(message)
        if meta.setdefault("namespace", namespace) != namespace:
            raise answers.bad_request(_OTHER_NAMESPACE)

    def _compare_version(self, resource: Resource, meta: Json, old: Json) -> None:
        """Whether the request means the version that is stored; without one it means any."""
        current, wanted = old["resourceVersion"], meta.get("resourceVersion", "")
        if wanted in ("", "0"):
            if self._kinds[resource].needs_version:
                cause = answers.wrong("metadata.resourceVersion", 0, "must be specified for an update")
                raise answers.invalid(resource, old["name"], [cause], kind=resource.plural)
        elif not wanted.isdecimal():
            raise answers.internal(f'strconv.ParseUint: parsing "{wanted}": invalid syntax')
        elif wanted != current:
            raise answers.modified(resource, old["name"])
        meta["resourceVersion"] = current

    def _admit(self, resource: Resource, namespace: str, name: str) -> None:
        if namespace in self.terminating:
            raise answers.namespace_terminating(resource, name, namespace)
        if namespace not in self.namespaces:
            raise answers.namespace_not_found(namespace)

    def _stored(self, resource: Resource, namespace: str, name: str) -> Json:
        obj = self.store.get(resource, namespace, name)
        if obj is None:
            raise answers.not_found(resource, name)
        return obj


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396; neither argument is changed, and unchanged parts are shared with ``target``."""
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
    """The body as it would arrive over HTTP: JSON, shared with nobody. Raises ``ValueError`` for NaN."""
    value = json.loads(json.dumps(body, allow_nan=False))
    if not isinstance(value, dict):
        raise answers.bad_request(f"error decoding: a JSON {type(value).__name__} is no object")
    arrived: Json = value
    return arrived


def _copy(obj: Json) -> Json:
    copied: Json = clone(obj)
    return copied
