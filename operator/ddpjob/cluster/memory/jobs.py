"""DDPJobs: a custom resource, so everything but ``metadata`` follows from the CRD's schema and its CEL rules."""

from functools import cache

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import metadata, schema, structural
from ddpjob.cluster.memory.answers import Cause, bad_request, wrong
from ddpjob.cluster.memory.fieldtypes import Findings, read
from ddpjob.cluster.memory.kinds import Kind


class Jobs(Kind):
    """The kind of the CRD that this version of the project installs."""

    resource = names.DDPJOBS
    is_core = False
    has_generation = True
    returns_deleted = False
    needs_version = True

    def __init__(self) -> None:
        self._schema = _schema()
        self._parts = self._schema.properties

    def read_new(self, body: Json) -> Json:
        if not body.get("kind"):
            raise bad_request("the object provided is unrecognized (must be of type DDPJob): Object 'Kind' is missing")
        version = body.get("apiVersion")
        if version != self.resource.api_version:
            message = f"the API version in the data ({version}) does not match the expected API version"
            raise bad_request(f"{message} ({self.resource.api_version})")
        return super().read_new(body)

    def read(self, body: Json, old: Json | None, findings: Findings) -> Json:
        before = old or {}
        obj: Json = {}
        for key, value in body.items():
            if key not in self._parts:
                findings.unknown.append(key)
            elif key in before and before[key] is value:
                obj[key] = value
            elif key == "metadata":
                obj[key] = read("V1ObjectMeta", value or {}, key, findings)
            elif value is not None:
                obj[key] = schema.read(self._parts[key], value, key, findings.unknown)
        if not findings.mistyped:
            obj["metadata"] = metadata.tidied(obj.get("metadata", {}))
        return obj

    def prepare_create(self, obj: Json) -> None:
        obj.pop("status", None)
        obj["metadata"]["generation"] = 1

    def check_create(self, obj: Json) -> list[Cause]:
        return self._identity(obj) or self._causes(obj, None, super().check_create(obj))

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        if (found := self._identity(new)) or new.get("spec") == old.get("spec"):
            return found or super().check_update(new, old)
        return self._causes(new, old, super().check_update(new, old))

    def prepare_status(self, new: Json, old: Json) -> None:
        status = new.pop("status", None)
        identity = {key: new[key] for key in ("apiVersion", "kind") if key in new}
        new.clear()
        new |= old | identity
        new.pop("status", None)
        if status is not None:
            new["status"] = status

    def check_status(self, new: Json, old: Json) -> list[Cause]:
        if found := self._identity(new):
            return found
        if "status" not in new:
            return []
        return structural.causes(self._parts["status"], new["status"], old.get("status"), "status", [])

    def _identity(self, obj: Json) -> list[Cause]:
        """A custom resource's kind and version are data until here."""
        expected = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
        return [
            wrong(key, obj.get(key), f"must be {value}") for key, value in expected.items() if obj.get(key) != value
        ]

    def _causes(self, obj: Json, old: Json | None, of_metadata: list[Cause]) -> list[Cause]:
        unchanged = ("status",) if old is None or obj.get("status") == old.get("status") else ()
        visible = {key: value for key, value in obj.items() if key not in unchanged}
        return structural.causes(self._schema, visible, old, "", of_metadata)


@cache
def _schema() -> schema.Schema:
    """Made once: it is a tenth of a second's work."""
    return schema.Schema.of(openapi())
