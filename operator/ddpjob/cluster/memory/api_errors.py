"""The API server's errors: typed exceptions with the code, reason and causes of its Status object.

The class, the code, ``details`` (name, group, kind, and field and reason of every cause) and the messages that name an
object are those of kube-apiserver. The text of a single cause is our own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Invalid,
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


def invalid_value(field: str, value: object, message: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {quoted(value)}: {message}")


def forbidden(field: str, message: str) -> Cause:
    return Cause(field, "FieldValueForbidden", f"Forbidden: {message}")


def duplicate(field: str, value: object) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {quoted(value)}")


def unsupported(field: str, value: object, supported: Iterable[str]) -> Cause:
    values = ", ".join(quoted(each) for each in supported)
    return Cause(field, "FieldValueNotSupported", f"Unsupported value: {quoted(value)}: supported values: {values}")


def group_of(resource: Resource) -> str:
    """Return the API group; empty for the core group."""
    group, *versions = resource.api_version.split("/")
    return group if len(versions) == 1 else ""


def details_of(resource: Resource, name: str, kind: str) -> Json:
    """Return ``details`` of a Status, without empty fields, as the API server writes it."""
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


def not_bindable(pod: str, why: str) -> Conflict:
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
    """Return the 422 for a patch whose result cannot be decoded. The API server then knows neither kind nor name."""
    cause = {"reason": "FieldValueInvalid", "message": f"Invalid value: {reason}", "field": "patch"}
    return Invalid(f' "" is invalid: patch: Invalid value: {reason}', code=422, details={"causes": [cause]})


def invalid(resource: Resource, name: str, causes: Sequence[Cause], *, kind: str = "") -> Invalid:
    """Return the 422 with every cause. ``resource`` has the kind that the object itself gives."""
    kind = kind or resource.kind
    lines = [f"{cause.field}: {cause.message}" for cause in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = details_of(resource, name, kind) | {
        "causes": [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    }
    return Invalid(f'{_qualified(resource, kind)} "{name}" is invalid: {text}', code=422, details=details)


def internal(message: str) -> Unavailable:
    """Return the 500 for a client's mistake that the API server does not check."""
    return Unavailable(message, code=500)


def expired(requested: int, oldest: int) -> ClusterError:
    """Return the 410 for a version older than ``oldest``, where the history begins. The client must list again."""
    return ClusterError(f"too old resource version: {requested} ({oldest})", code=410)


def deleted(resource: Resource, name: str, uid: str) -> Json:
    """Return the Status for the deletion of an object that was removed at once."""
    details = details_of(resource, name, resource.plural) | {"uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _qualified(resource: Resource, kind: str) -> str:
    group = group_of(resource)
    return f"{kind}.{group}" if group else kind


def quoted(value: object) -> str:
    """Return a value as error texts show it: strings in double quotes."""
    return f'"{value}"' if isinstance(value, str) else str(value)
