"""The selectors that this project uses: ``key`` (exists) and ``key=value`` of labels, and the object of an Event.

Others are refused. https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors.
"""

from collections.abc import Callable

from ddpjob.api.objects import Json
from tests.worlds.memory.api_errors import bad_request

Matcher = Callable[[Json], bool]


def label_matcher(selector: str | None) -> Matcher:
    """Return a function that matches objects by label; an empty selector matches all."""
    wanted = [term.strip().partition("=") for term in selector.split(",")] if selector and selector.strip() else []

    def matches(obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)

    return matches


def field_matcher(selector: str | None) -> Matcher:
    """Return a function that matches Events by ``involvedObject.uid``. Raises ``Invalid`` (400) for other fields."""
    path, _, value = (selector or "").partition("=")
    if path not in ("", "involvedObject.uid"):
        raise bad_request(f"field label not supported: {path}")
    return lambda obj: not path or obj["involvedObject"].get("uid", "") == value
