"""What the API server knows of a kind: how it reads, fills in and checks an object. One subclass for each kind.

``api.py`` calls the steps in the order of the real request handlers; nothing here knows what is stored.
"""

from collections.abc import Callable
from typing import Any

from ddpjob.api.names import Resource
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import metadata
from ddpjob.cluster.memory.answers import Cause, bad_request, invalid_patch, undecodable
from ddpjob.cluster.memory.fieldtypes import Findings, read
from ddpjob.cluster.memory.formats import is_dns_subdomain

SUBDOMAIN_RULE = "a lowercase RFC 1123 subdomain must consist of lower case letters, digits, '-' and '.'"


class Kind:
    """A kind whose types are Kubernetes' own. Objects passed in may be changed in place unless said otherwise."""

    resource: Resource
    model: str
    is_name: Callable[[str], bool] = staticmethod(is_dns_subdomain)
    name_rule = SUBDOMAIN_RULE
    is_core = True
    """Whether finalizers must be qualified, as Kubernetes asks of its own kinds."""
    has_status = True
    has_generation = False
    returns_deleted = True
    """Whether DELETE answers with the object even when it is gone; a Status otherwise."""
    needs_version = False
    """Whether an update must say which version it changes."""

    def read_new(self, body: Json) -> Json:
        """The object that a POST's body means, with the schema's defaults. Raises ``Invalid`` (400)."""
        findings = Findings()
        obj = self.read(body, None, findings)
        if findings.mistyped or findings.unknown:
            raise self._undecodable(findings)
        return obj

    def read_patched(self, merged: Json, old: Json) -> Json:
        """The object that a patch makes of ``old``, with the schema's defaults. Raises ``Invalid`` (422)."""
        findings = Findings()
        obj = self.read(merged, old, findings)
        if findings.mistyped or findings.unknown:
            raise invalid_patch(findings.mistyped or strictly(findings.unknown))
        return obj

    def read(self, body: Json, old: Json | None, findings: Findings) -> Json:
        """Both of the above. Parts of ``body`` that are those of ``old``, the very same, need no reading."""
        kind, version = body.get("kind") or self.resource.kind, body.get("apiVersion") or self.resource.api_version
        if (kind, version) != (self.resource.kind, self.resource.api_version):
            raise bad_request(f"{version}, Kind={kind} cannot be handled as a {self.resource.kind}")
        before = old or {}
        # What a patch does not touch is the stored object's own, and was read when that was written.
        changed = {key: value for key, value in body.items() if key not in before or before[key] is not value}
        obj = {key: value for key, value in body.items() if key not in changed}
        obj |= read(self.model, changed, "", findings)
        obj |= {"apiVersion": self.resource.api_version, "kind": self.resource.kind}
        if not findings.mistyped:
            obj["metadata"] = metadata.tidied(obj.get("metadata", {}))
            self.fill_in(obj)
        return obj

    def fill_in(self, obj: Json) -> None:
        """Defaults of the schema: they hold after every write."""

    def prepare_create(self, obj: Json) -> None:
        """What the API server decides about a new object: admission's defaults and the initial status."""

    def check_create(self, obj: Json) -> list[Cause]:
        """What is wrong with a new object."""
        return list(metadata.on_create(obj["metadata"], self.is_name, self.name_rule, is_core=self.is_core))

    def prepare_update(self, new: Json, old: Json) -> None:
        """Keep what a write to the main resource cannot change."""
        if self.has_status:
            keep(new, old, "status")
        if self.has_generation:
            changed = self.desired(new) != self.desired(old)
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + changed

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        """What is wrong with an update of the main resource."""
        return list(metadata.on_update(new["metadata"], old["metadata"], is_core=self.is_core))

    def prepare_status(self, new: Json, old: Json) -> None:
        """Keep what a write to the status cannot change."""
        keep(new, old, "spec")
        keep(new["metadata"], old["metadata"], "ownerReferences")

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        """What is wrong with a write to the status."""
        return list(metadata.on_update(new["metadata"], old["metadata"], is_core=self.is_core))

    def grace_seconds(self, obj: Json, requested: int | None) -> int | None:
        """How long a deleted object goes on; None where the kind knows no graceful end."""
        del obj, requested
        return None

    def desired(self, obj: Json) -> Any:
        """What ``generation`` counts the changes of."""
        return obj.get("spec")

    def _undecodable(self, findings: Findings) -> Exception:
        return undecodable(self.resource, findings.mistyped or strictly(findings.unknown))


def strictly(unknown: list[str]) -> str:
    """The words of strict decoding."""
    return "strict decoding error: " + ", ".join(f'unknown field "{path}"' for path in unknown)


def keep(new: Json, old: Json, key: str) -> None:
    """Put ``new[key]`` back to what it was."""
    new.pop(key, None)
    if key in old:
        new[key] = old[key]
