"""The controllers of kube-controller-manager that delete: of objects without owners, claims and namespaces.

Rules of background deletion: https://kubernetes.io/docs/concepts/architecture/garbage-collection/.
"""

from collections.abc import Mapping
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.worlds.memory.kinds import CLAIM_PROTECTION


class Collector:
    """Reads objects from the store of an ``ApiServer`` and changes them by its requests."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._store = server.store
        self._kinds: Mapping[tuple[str, str], Resource] = {
            (resource.api_version, resource.kind): resource
            for resource in (names.DDPJOBS, names.PODS, names.SERVICES, names.NETWORK_POLICIES, names.CLAIMS)
        }

    def run(self) -> int:
        """Collect until nothing is left to do. Return the number of requests."""
        requests = 0
        while done := self._once():
            requests += done
        return requests

    def _once(self) -> int:
        done = 0
        # Events have no owner, and there are many.
        without = () if self._server.terminating else (names.EVENTS,)
        for resource, obj in list(self._store.everything(without)):
            meta = obj["metadata"]
            if self._store.get(resource, meta["namespace"], meta["name"]) is obj:
                done += self._collect(resource, obj)
        return done

    def _collect(self, resource: Resource, obj: Json) -> int:
        meta = obj["metadata"]
        if resource is names.CLAIMS and (done := self._protect(obj)):
            return done
        if "deletionTimestamp" in meta:
            return 0
        if meta["namespace"] in self._server.terminating:
            # Pods go first, then the objects that they use.
            waits = resource is not names.PODS and any(self._store.all(names.PODS, meta["namespace"]))
            return 0 if waits else self._delete(resource, obj)
        references = meta.get("ownerReferences", [])
        if not references or resource is names.EVENTS:
            return 0
        # An owner of a kind that is not served may exist: keep the object.
        if any((ref["apiVersion"], ref["kind"]) not in self._kinds for ref in references):
            return 0
        present = [ref for ref in references if self._exists(ref, meta["namespace"])]
        if not present:
            return self._delete(resource, obj)
        if len(present) == len(references):
            return 0
        body = {"metadata": {"uid": meta["uid"], "ownerReferences": present}}
        self._server.patch(resource, meta["namespace"], meta["name"], body)
        return 1

    def _exists(self, reference: Json, namespace: str) -> bool:
        resource = self._kinds[reference["apiVersion"], reference["kind"]]
        owner = self._store.get(resource, namespace, reference["name"])
        return owner is not None and owner["metadata"]["uid"] == reference["uid"]

    def _delete(self, resource: Resource, obj: Json) -> int:
        meta = obj["metadata"]
        self._server.delete(resource, meta["namespace"], meta["name"], uid=meta["uid"])
        return 1

    def _protect(self, claim: Json) -> int:
        """Add the finalizer to a live claim. Remove it from a deleted claim that no placed pod uses."""
        meta = claim["metadata"]
        finalizers: list[str] = meta.get("finalizers", [])
        others = [finalizer for finalizer in finalizers if finalizer != CLAIM_PROTECTION]
        wanted = others if "deletionTimestamp" in meta else [*others, CLAIM_PROTECTION]
        is_protected = CLAIM_PROTECTION in finalizers
        if is_protected is (CLAIM_PROTECTION in wanted) or (is_protected and self._is_used(claim)):
            return 0
        self._server.patch(names.CLAIMS, meta["namespace"], meta["name"], {"metadata": {"finalizers": wanted or None}})
        return 1

    def _is_used(self, claim: Json) -> bool:
        meta = claim["metadata"]
        return any(
            pod["spec"].get("nodeName") and volume.get("persistentVolumeClaim", {}).get("claimName") == meta["name"]
            for pod in self._store.all(names.PODS, meta["namespace"])
            for volume in pod["spec"].get("volumes", ())
        )
