"""What a conversion does not carry over."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Note:
    """A field of the source that does not carry over as it is.

    field: its path in the source. why: what is different in a DDPJob. action: what to do; empty if nothing.
    """

    field: str
    why: str
    action: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.why}" + (f"; {self.action}" if self.action else "")


_REFERENCE = "docs/reference/fields.md lists the fields of a DDPJob"


def note_others(given: Mapping[str, Any], known: Collection[str], path: str, notes: list[Note]) -> None:
    """Note each field of an object that the conversion does not know; empty ones say nothing."""
    for key, value in given.items():
        if key not in known and value not in (None, {}, [], ""):
            notes.append(Note(f"{path}.{key}", "this field is not known here", _REFERENCE))
