"""DDPJobs: a custom resource, so everything but ``metadata`` follows from the CRD's schema and its CEL rules."""

from typing import Any, cast

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import metadata, structural
from ddpjob.cluster.memory.answers import Cause, bad_request, wrong
from ddpjob.cluster.memory.fieldtypes import Findings, read
from ddpjob.cluster.memory.kinds import Kind

_INT64 = 2**63


class Jobs(Kind):
    """The kind of the CRD that this version of the project installs."""

    resource = names.DDPJOBS
    is_core = False
    has_generation = True
    returns_deleted = False
    needs_version = True

    def __init__(self) -> None:
        self._schema = openapi()
        structural.check_keywords(self._schema)
        self._parts: dict[str, structural.Node] = self._schema["properties"]

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
            elif old is not None and before.get(key) == value:
                obj[key] = value
            elif key == "metadata":
                obj[key] = read("V1ObjectMeta", value or {}, key, findings)
            else:
                findings.unknown += structural.unknown_fields(self._parts[key], value, key)
                if value is not None:
                    obj[key] = structural.defaulted(self._parts[key], _numbers(value))
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


def _numbers(value: Any) -> Any:
    """Numbers as Go's JSON has them: 2.0 is the integer 2, and what exceeds 64 bits is a float."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _INT64:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        return float(value)
    return cast(Any, value)
