"""API objects as JSON: elements of their lists by key, and their conditions."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object."""
SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "managedFields")
"""Fields of metadata; `ddpjob get -o yaml` and `kubectl get -o yaml` print them."""


def element(items: Iterable[Json] | None, key: str, value: str) -> Json:
    """Return the element of a list in which ``key`` has this value, for example a container by name; {} if none."""
    return next((item for item in items or () if item.get(key) == value), {})


def condition(status: Mapping[str, Any] | None, kind: str) -> Json:
    """Return a condition of a status, {} if it is not set."""
    return element((status or {}).get("conditions"), "type", kind)


def is_true(status: Mapping[str, Any] | None, kind: str) -> bool:
    """Return whether a condition of a status is True."""
    return condition(status, kind).get("status") == "True"


def value_at(value: Any, keys: Iterable[str]) -> Any:
    """Return the value at a path of fields; None if it is absent."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def owner_uid(obj: Mapping[str, Any]) -> str | None:
    """Return the uid of an object's controlling owner, or None."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((str(owner.get("uid")) for owner in owners if owner.get("controller")), None)


def event_time(event: Mapping[str, Any]) -> str:
    """Return when an Event was last seen."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def levels(value: object) -> Iterator[list[object]]:
    """Yield the values of each level of a JSON value, from the value itself to the deepest; it does not recurse."""
    level = [value]
    while level:
        yield level
        nested = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [child for children in nested for child in children]
