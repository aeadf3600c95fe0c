"""The six kinds that the in-memory cluster serves: how each is read, completed and checked.

``server`` calls the methods of ``Kind`` in the order of the real request handlers. Nothing here knows what is stored.
Of Kubernetes' own kinds the bodies are stored as they are sent: without defaults and without checks of their values.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.spec import NAME_RULE, DDPJobSpec, forbidden_changes, is_job_name
from ddpjob.api.status import DDPJobStatus
from tests.worlds.memory.api_errors import Cause, bad_request, invalid_patch, undecodable
from tests.worlds.memory.decoding import causes, read_custom, strict_error

CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
GRACE_SECONDS = 30
IMMUTABLE = "field is immutable"


class Kind:
    """A kind whose types are Kubernetes' own. Objects passed in may be changed in place unless said otherwise.

    returns_deleted: whether DELETE returns the object, not a Status, when the object is removed at once.
    needs_version: whether an update must contain the version that it changes.
    """

    resource: Resource
    has_status = True
    has_generation = False
    returns_deleted = True
    needs_version = False

    def read_new(self, body: Json) -> Json:
        """Return the object that a POST creates."""
        meta = tidied_metadata(body.get("metadata") or {})
        return body | {"apiVersion": self.resource.api_version, "kind": self.resource.kind, "metadata": meta}

    def read_patched(self, merged: Json, old: Json) -> Json:
        """Return the object that a patch makes of ``old``."""
        return merged | {"metadata": tidied_metadata(merged["metadata"])}

    def prepare_create(self, obj: Json) -> None:
        """Set what the API server decides about a new object: the initial status, the generation."""
        if self.has_generation:
            obj["metadata"]["generation"] = 1

    def check_create(self, obj: Json) -> list[Cause]:
        """Return what is wrong with a new object."""
        return [] if obj["metadata"].get("name") else [Cause("metadata.name", "required")]

    def prepare_update(self, new: Json, old: Json) -> None:
        """Restore what a write to the main resource cannot change."""
        if self.has_status:
            restore(new, old, "status")
        if self.has_generation:
            changed = new.get("spec") != old.get("spec")
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + changed

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        """Return what is wrong with an update of the main resource."""
        return check_changed_metadata(new["metadata"], old["metadata"])

    def prepare_status(self, new: Json, old: Json) -> None:
        """Restore what a write to the status cannot change."""
        restore(new, old, "spec")
        restore(new["metadata"], old["metadata"], "ownerReferences")

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        """Return what is wrong with a write to the status."""
        return check_changed_metadata(new["metadata"], old["metadata"])

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        """Return how long a deleted object keeps running, or None for a kind without graceful deletion."""
        del obj, requested
        return None


class Jobs(Kind):
    """DDPJobs, a custom resource: checked by the models of ``ddpjob.api``, from which the CRD is generated."""

    resource = names.DDPJOBS
    has_generation = True
    returns_deleted = False
    needs_version = True

    _PARTS: ClassVar[Mapping[str, type[WireModel]]] = {"spec": DDPJobSpec, "status": DDPJobStatus}

    def __init__(self) -> None:
        # The spec and the status that were last read and found valid: checking them once is enough.
        self._valid: Json = {}

    def read_new(self, body: Json) -> Json:
        """Return the object that a POST creates, with the schema's defaults. Raises ``Invalid`` (400)."""
        if not body.get("kind") or body.get("apiVersion") != self.resource.api_version:
            raise bad_request(f"the object must have a kind and the API version {self.resource.api_version}")
        findings: list[str] = []
        obj = self._read(body, {}, findings)
        if findings:
            raise undecodable(self.resource, strict_error(findings))
        return obj

    def read_patched(self, merged: Json, old: Json) -> Json:
        """Return the object that a patch makes of ``old``, with the schema's defaults. Raises ``Invalid`` (422)."""
        findings: list[str] = []
        obj = self._read(merged, old, findings)
        if findings:
            raise invalid_patch(strict_error(findings))
        return obj

    def _read(self, body: Json, old: Json, findings: list[str]) -> Json:
        obj: Json = {}
        for key, value in body.items():
            if key not in ("apiVersion", "kind", "metadata", *self._PARTS):
                findings.append(key)
            elif key in old and old[key] is value:
                obj[key] = value
            elif key == "metadata":
                obj[key] = value or {}
            elif key in self._PARTS and value is not None:
                obj[key], is_valid = read_custom(self._PARTS[key], value, key, findings)
                if is_valid:
                    self._valid[key] = obj[key]
            elif value is not None:
                obj[key] = value
        obj["metadata"] = tidied_metadata(obj.get("metadata", {}))
        return obj

    def prepare_create(self, obj: Json) -> None:
        super().prepare_create(obj)
        obj.pop("status", None)

    def check_create(self, obj: Json) -> list[Cause]:
        return self._check_identity(obj) or self._with_rules(super().check_create(obj), obj, None)

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        if (found := self._check_identity(new)) or new.get("spec") == old.get("spec"):
            return found or super().check_update(new, old)
        return self._with_rules(super().check_update(new, old), new, old)

    def prepare_status(self, new: Json, old: Json) -> None:
        kept = old | {key: new[key] for key in ("apiVersion", "kind", "status") if key in new}
        if "status" not in new:
            kept.pop("status", None)
        new.clear()
        new |= kept

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        if found := self._check_identity(new):
            return found
        return self._check_part("status", new["status"]) if "status" in new else []

    def _check_identity(self, obj: Json) -> list[Cause]:
        """Check kind and version: a patch of a custom resource may contain others."""
        expected = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
        return [Cause(key, f"must be {value}") for key, value in expected.items() if obj.get(key) != value]

    def _with_rules(self, found: list[Cause], new: Json, old: Json | None) -> list[Cause]:
        """Return ``found`` with what is wrong with the spec, its change and the job's name."""
        found += self._check_part("spec", new["spec"]) if "spec" in new else [Cause("spec", "required")]
        if found:
            return found
        messages = forbidden_changes(old["spec"], new["spec"]) if old is not None else []
        found += [Cause("spec", message) for message in messages]
        if not is_job_name(new["metadata"]["name"]):
            # A rule on the whole object, whose path is <nil>.
            found.append(Cause("<nil>", NAME_RULE.message))
        return found

    def _check_part(self, key: str, value: Any) -> list[Cause]:
        return [] if value is self._valid.get(key) else causes(self._PARTS[key], value, key)


class Pods(Kind):
    """Pods: their live changes, and their graceful deletion."""

    resource = names.PODS
    has_generation = True

    def prepare_create(self, obj: Json) -> None:
        super().prepare_create(obj)
        obj["status"] = {"phase": "Pending"}

    def prepare_status(self, new: Json, old: Json) -> None:
        super().prepare_status(new, old)
        restore(new["metadata"], old["metadata"], "deletionTimestamp")

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        return [*super().check_status(new, old), *_check_container_states(new, old)]

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        given = obj["spec"].get("terminationGracePeriodSeconds", GRACE_SECONDS)
        seconds = given if requested is None else requested
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
            return 0  # no kubelet has it, or no container of it runs
        return int(seconds)


class Services(Kind):
    """Headless Services. No addresses are assigned."""

    resource = names.SERVICES

    def prepare_create(self, obj: Json) -> None:
        obj["status"] = {"loadBalancer": {}}


class NetworkPolicies(Kind):
    """NetworkPolicies. Nothing enforces them."""

    resource = names.NETWORK_POLICIES
    has_status = False
    has_generation = True
    returns_deleted = False


class Claims(Kind):
    """PersistentVolumeClaims. They are never bound. A finalizer keeps a claim that a placed pod uses."""

    resource = names.CLAIMS

    def prepare_create(self, obj: Json) -> None:
        obj["status"] = {"phase": "Pending"}
        finalizers = obj["metadata"].get("finalizers", [])
        if CLAIM_PROTECTION not in finalizers:
            obj["metadata"]["finalizers"] = [*finalizers, CLAIM_PROTECTION]


class Events(Kind):
    """core/v1 Events. They never expire here."""

    resource = names.EVENTS
    has_status = False
    returns_deleted = False


def restore(new: Json, old: Json, key: str) -> None:
    """Set ``new[key]`` back to what it is in ``old``."""
    new.pop(key, None)
    if key in old:
        new[key] = old[key]


def tidied_metadata(meta: Json) -> Json:
    """Return metadata without nulls, the bookkeeping of field managers, and repeated owner references."""
    out = {key: value for key, value in meta.items() if key != "managedFields" and value not in (None, [], {}, "")}
    references = out.get("ownerReferences")
    if references is not None:
        out["ownerReferences"] = [ref for index, ref in enumerate(references) if ref not in references[:index]]
    return out


def check_changed_metadata(new: Json, old: Json) -> list[Cause]:
    """Check the metadata of an update. The server compares name and namespace with the request."""
    fixed = ("uid", "deletionTimestamp", "deletionGracePeriodSeconds")
    found = [Cause(f"metadata.{key}", IMMUTABLE) for key in fixed if new.get(key) != old.get(key)]
    if "deletionTimestamp" in old and set(new.get("finalizers", ())) - set(old.get("finalizers", ())):
        found.append(Cause("metadata.finalizers", "no new finalizers if the object is being deleted"))
    return found


def _check_container_states(new: Json, old: Json) -> list[Cause]:
    """Check that a container that has ended and is not restarted does not run again."""
    policy = old["spec"].get("restartPolicy", "Always")
    if policy == "Always":
        return []
    states = {container["name"]: container["state"] for container in old["status"].get("containerStatuses", ())}
    found = []
    for index, container in enumerate(new["status"].get("containerStatuses", ())):
        terminated = states.get(container["name"], {}).get("terminated")
        retried = policy == "OnFailure" and terminated and terminated.get("exitCode", 0) != 0
        if terminated and not retried and "terminated" not in container["state"]:
            path = f"status.containerStatuses[{index}].state"
            found.append(Cause(path, "may not be transitioned to non-terminated state"))
    return found
