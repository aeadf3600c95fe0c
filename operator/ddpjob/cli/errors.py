"""Three lines for every mistake: what is wrong and where, why that may be, what to do now."""

import difflib
import sys
from collections.abc import Iterable
from typing import TextIO

from ddpjob.cli.printable import one_line
from ddpjob.local.errors import LocalError

USAGE = 2  # the exit code of a mistake, or of a spec that is refused


def lines(error: LocalError) -> list[str]:
    """The error as a user reads it; an empty hint or next step is left out."""
    parts = (("error: ", error.error), ("hint:  ", error.hint), ("next:  ", error.next_step))
    return [label + one_line(words) for label, words in parts if words]


def show(error: LocalError, stream: TextIO | None = None) -> None:
    """Print it, on standard error unless told otherwise."""
    print("\n".join(lines(error)), file=stream or sys.stderr, flush=True)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint at the nearest of the known names, else ``otherwise``."""
    choices = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.6)
    return f'did you mean "{choices[near[0]]}"?' if near else otherwise
