"""The API server's refusals in its own words: typed errors with the code, reason and causes of its Status object.

What a person or a program may depend on is kept: class, code, ``details`` (name, group, kind, field and reason of
every cause) and the messages that name an object. The prose of a single cause is our own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpjob.api.names import Resource
from ddpjob.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Invalid,
    Json,
    NamespaceTerminating,
    NotFound,
    Unavailable,
)

CauseReason = Literal[
    "FieldValueDuplicate",
    "FieldValueForbidden",
    "FieldValueInvalid",
    "FieldValueNotFound",
    "FieldValueNotSupported",
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
]


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with one field; ``field`` is a path such as ``spec.containers[0].name``."""

    field: str
    reason: CauseReason
    message: str


def required(field: str, message: str = "Required value") -> Cause:
    return Cause(field, "FieldValueRequired", message)


def wrong(field: str, value: object, message: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {_quoted(value)}: {message}")


def forbidden(field: str, message: str) -> Cause:
    return Cause(field, "FieldValueForbidden", f"Forbidden: {message}")


def duplicate(field: str, value: object) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {_quoted(value)}")


def unsupported(field: str, value: object, supported: Iterable[str]) -> Cause:
    words = ", ".join(_quoted(word) for word in supported)
    return Cause(field, "FieldValueNotSupported", f"Unsupported value: {_quoted(value)}: supported values: {words}")


def group_of(resource: Resource) -> str:
    """The API group; empty for the core group."""
    group, *versions = resource.api_version.split("/")
    return group if len(versions) == 1 else ""


def details_of(resource: Resource, name: str, kind: str) -> Json:
    """``details`` of a Status: empty fields are left out, as the API server does."""
    return {key: value for key, value in (("name", name), ("group", group_of(resource)), ("kind", kind)) if value}


def not_found(resource: Resource, name: str) -> NotFound:
    message = f'{_qualified(resource, resource.plural)} "{name}" not found'
    return NotFound(message, code=404, details=details_of(resource, name, resource.plural))


def namespace_not_found(name: str) -> NotFound:
    return NotFound(f'namespaces "{name}" not found', code=404, details={"name": name, "kind": "namespaces"})


def namespace_terminating(resource: Resource, name: str, namespace: str) -> NamespaceTerminating:
    because = f"unable to create new content in namespace {namespace} because it is being terminated"
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    details = details_of(resource, name, resource.plural) | {"causes": [cause]}
    message = f'{_qualified(resource, resource.plural)} "{name}" is forbidden: {because}'
    return NamespaceTerminating(message, code=403, details=details)


def no_such_subresource() -> NotFound:
    return NotFound("the server could not find the requested resource", code=404)


def already_exists(resource: Resource, name: str, *, being_deleted: bool) -> AlreadyExists:
    message = f'{_qualified(resource, resource.plural)} "{name}" already exists'
    message = f"object is being deleted: {message}" if being_deleted else message
    return AlreadyExists(message, code=409, details=details_of(resource, name, resource.plural))


def modified(resource: Resource, name: str) -> Conflict:
    what = f'{_qualified(resource, resource.plural)} "{name}"'
    message = (
        f"Operation cannot be fulfilled on {what}: the object has been modified; please apply your changes to the "
        "latest version and try again"
    )
    return Conflict(message, code=409, details=details_of(resource, name, resource.plural))


def unplaceable(pod: str, why: str) -> Conflict:
    details = {"name": pod, "kind": "pods/binding"}
    return Conflict(f'Operation cannot be fulfilled on pods/binding "{pod}": {why}', code=409, details=details)


def wrong_uid(resource: Resource, kind: str, name: str, expected: str, actual: str) -> Conflict:
    message = (
        f'Operation cannot be fulfilled on {_qualified(resource, kind)} "{name}": the UID in the precondition '
        f"({expected}) does not match the UID in record ({actual}). The object might have been deleted and then "
        "recreated"
    )
    return Conflict(message, code=409, details=details_of(resource, name, kind))


def bad_request(message: str) -> Invalid:
    return Invalid(message, code=400)


def undecodable(resource: Resource, reason: str) -> Invalid:
    version = resource.api_version.rpartition("/")[2]
    return bad_request(f'{resource.kind} in version "{version}" cannot be handled as a {resource.kind}: {reason}')


def invalid_patch(reason: str) -> Invalid:
    """A patch whose result cannot be decoded; the API server then knows neither kind nor name."""
    cause = {"reason": "FieldValueInvalid", "message": f"Invalid value: {reason}", "field": "patch"}
    return Invalid(f' "" is invalid: patch: Invalid value: {reason}', code=422, details={"causes": [cause]})


def invalid(resource: Resource, name: str, causes: Sequence[Cause], *, kind: str = "") -> Invalid:
    """422 with every cause. ``resource``: of the kind that the object says it is."""
    kind = kind or resource.kind
    lines = [f"{cause.field}: {cause.message}" for cause in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = details_of(resource, name, kind) | {
        "causes": [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    }
    return Invalid(f'{_qualified(resource, kind)} "{name}" is invalid: {text}', code=422, details=details)


def internal(message: str) -> Unavailable:
    """500: what the API server answers where it did not think of the client's mistake."""
    return Unavailable(message, code=500)


def expired(requested: int, oldest: int) -> ClusterError:
    """410: history before ``oldest`` is gone; list again."""
    return ClusterError(f"too old resource version: {requested} ({oldest})", code=410)


def deleted(resource: Resource, name: str, uid: str) -> Json:
    """The Status that answers the deletion of an object that is gone at once."""
    details = details_of(resource, name, resource.plural) | {"uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _qualified(resource: Resource, kind: str) -> str:
    group = group_of(resource)
    return f"{kind}.{group}" if group else kind


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
