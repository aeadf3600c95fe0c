"""Label selectors, for the jobs of this machine; an API server evaluates them itself.

https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors
"""

import re
from collections.abc import Callable, Mapping

from ddpjob.errors import InvalidJobError

_PART = re.compile(
    r"\s*(?P<absent>!)?\s*(?P<key>[A-Za-z0-9](?:[\w./-]*[A-Za-z0-9])?)\s*"
    r"(?:(?P<equal>==?|!=)\s*(?P<value>[\w.-]*)|(?<=\s)(?P<set>in|notin)\s*\((?P<values>[\w.,\s-]*)\))?\s*(?:,|$)"
)


def matching(selector: str) -> Callable[[Mapping[str, str]], bool]:
    """Return whether labels match a selector such as ``team=a,stage in (test, prod),!old``, as a function of them.

    Raises:
        InvalidJobError: it is not a label selector.
    """
    wanted: list[tuple[str, frozenset[str] | None, bool]] = []  # key, its values or any, whether it must not match
    position = 0
    while position < len(selector.rstrip()):
        part = _PART.match(selector, position)
        operator = part and (part["equal"] or part["set"])
        if part is None or (part["absent"] and operator):
            raise InvalidJobError(
                f"{selector!r} is not a label selector",
                "it has the form of kubectl's",
                "for example -l team=a or -l 'team in (a, b),!old'",
            )
        values = [part["value"]] if part["equal"] else (part["values"] or "").split(",")
        known = frozenset(value.strip() for value in values) if operator else None
        wanted.append((part["key"], known, bool(part["absent"]) or operator in ("!=", "notin")))
        position = part.end()

    def matches(labels: Mapping[str, str]) -> bool:
        return all((key in labels if of is None else labels.get(key) in of) != is_not for key, of, is_not in wanted)

    return matches
