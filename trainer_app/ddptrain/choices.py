"""Flags that hold several values at once: numbers of ranks, or a choice among what there is.

``model_verbs`` reads them for ``compare`` and ``bench``, so that a mistake is refused before the first run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.errors import UsageError


def worlds_of(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers, sorted, 1 among them.

    Raises:
        UsageError: not a list of numbers of ranks.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise UsageError(f"--worlds {text!r} is not a list of numbers of ranks", next_step="give --worlds 1,2,4")
    return tuple(sorted({1, *map(int, parts)}))


def chosen(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated choice of ``known``.

    Raises:
        UsageError: something else is among it.
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    strangers = [part for part in parts if part not in known]
    if strangers or not parts:
        raise UsageError(f"{flag} {text!r}: known are {', '.join(known)}", next_step=f"correct {flag}")
    return parts
