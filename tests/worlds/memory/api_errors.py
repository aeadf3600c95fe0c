"""The API server's errors: typed exceptions with the code, reason and causes of its Status object.

The class, the code, ``details`` (name, group, kind, and the field of every cause) and the messages that name an object
are those of kube-apiserver. The text of a single cause is our own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Invalid,
    NamespaceTerminating,
    NotFound,
    NotServed,
    Unavailable,
)


class Cause(NamedTuple):
    """One thing that is wrong with one field; ``field`` is a path such as ``spec.containers[0].name``."""

    field: str
    message: str


def not_found(resource: Resource, name: str) -> NotFound:
    what, details = _named(resource, name)
    return NotFound(f"{what} not found", code=404, details=details)


def namespace_not_found(name: str) -> NotFound:
    return NotFound(f'namespaces "{name}" not found', code=404, details={"name": name, "kind": "namespaces"})


def namespace_terminating(resource: Resource, name: str, namespace: str) -> NamespaceTerminating:
    what, details = _named(resource, name)
    because = f"unable to create new content in namespace {namespace} because it is being terminated"
    details["causes"] = [
        {
            "reason": "NamespaceTerminating",
            "message": f"namespace {namespace} is being terminated",
            "field": "metadata.namespace",
        }
    ]
    return NamespaceTerminating(f"{what} is forbidden: {because}", code=403, details=details)


def no_such_subresource() -> NotServed:
    return NotServed("the server could not find the requested resource", code=404)


def already_exists(resource: Resource, name: str, *, being_deleted: bool) -> AlreadyExists:
    what, details = _named(resource, name)
    prefix = "object is being deleted: " if being_deleted else ""
    return AlreadyExists(f"{prefix}{what} already exists", code=409, details=details)


def modified(resource: Resource, name: str) -> Conflict:
    what, details = _named(resource, name)
    message = (
        f"Operation cannot be fulfilled on {what}: the object has been modified; please apply your changes to the "
        "latest version and try again"
    )
    return Conflict(message, code=409, details=details)


def not_bindable(pod: str, why: str) -> Conflict:
    details = {"name": pod, "kind": "pods/binding"}
    return Conflict(f'Operation cannot be fulfilled on pods/binding "{pod}": {why}', code=409, details=details)


def wrong_uid(resource: Resource, name: str, expected: str, actual: str) -> Conflict:
    what, details = _named(resource, name, resource.kind)
    message = (
        f"Operation cannot be fulfilled on {what}: the UID in the precondition ({expected}) does not match the UID in "
        f"record ({actual}). The object might have been deleted and then recreated"
    )
    return Conflict(message, code=409, details=details)


def bad_request(message: str) -> Invalid:
    return Invalid(message, code=400)


def undecodable(resource: Resource, reason: str) -> Invalid:
    version = resource.api_version.rpartition("/")[2]
    return bad_request(f'{resource.kind} in version "{version}" cannot be handled as a {resource.kind}: {reason}')


def invalid_patch(reason: str) -> Invalid:
    """Return the 422 for a patch whose result cannot be decoded. The API server then knows neither kind nor name."""
    cause = Cause("patch", f"Invalid value: {reason}")
    return Invalid(f' "" is invalid: patch: Invalid value: {reason}', code=422, details={"causes": [cause._asdict()]})


def invalid(resource: Resource, name: str, causes: Sequence[Cause], *, kind: str = "") -> Invalid:
    """Return the 422 with every cause. ``resource`` has the kind that the object itself gives."""
    what, details = _named(resource, name, kind or resource.kind)
    lines = [f"{cause.field}: {cause.message}" for cause in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details["causes"] = [cause._asdict() for cause in causes]
    return Invalid(f"{what} is invalid: {text}", code=422, details=details)


def internal(message: str) -> Unavailable:
    """Return the 500 for a client's mistake that the API server does not check."""
    return Unavailable(message, code=500)


def expired(requested: int, oldest: int) -> ClusterError:
    """Return the 410 for a version older than ``oldest``, where the history begins. The client must list again."""
    return ClusterError(f"too old resource version: {requested} ({oldest})", code=410)


def deleted(resource: Resource, name: str, uid: str) -> Json:
    """Return the Status for the deletion of an object that was removed at once."""
    details = _named(resource, name)[1] | {"uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _named(resource: Resource, name: str, kind: str | None = None) -> tuple[str, Json]:
    """Return the object as messages name it, and the ``details`` of a Status. kind: by default the plural."""
    kind = resource.plural if kind is None else kind
    first, *versions = resource.api_version.split("/")
    group = first if len(versions) == 1 else ""  # the core group has no name
    details = {"name": name, "group": group, "kind": kind}
    what = f'{kind}.{group} "{name}"' if group else f'{kind} "{name}"'
    return what, {key: value for key, value in details.items() if value}
