"""What the launcher runs in each rank: the interface between a trainer and the launcher; and how a command ends."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.errors import TrainerError
from ddprun.reporting import termination


@dataclass(frozen=True)
class RankProcess:
    """What a program gets from the launcher, in the process of its rank.

    Attributes:
        reports: the pipe on which the launcher reads the rank's report, as JSON.
    """

    ranks: Ranks
    diagnostics: Diagnostics
    reports: int


class Program(Protocol):
    """A trainer. Its instances are pickled for ``--start spawn``, so the class is defined at the top of a module."""

    @property
    def sends_an_ending(self) -> bool:
        """Whether each rank sends its ending and reads the others' announcements; a user's script may do neither."""

    @property
    def shares_progress(self) -> bool:
        """Whether rank 0 keeps its progress report in ``Diagnostics``, and the launcher answers ``GET /progress``."""

    def preload(self) -> str:
        """In the launcher, before it forks: import everything that a rank needs, and nothing that computes.

        Returns:
            why the ranks must not be forked, but have interpreters of their own; empty if they may be forked.
        """

    def run(self, rank: RankProcess) -> int:
        """In the rank: train, send the ending to the launcher, and return the exit code."""


def code_of(command: Callable[[], int]) -> int:
    """Return the exit code of a command; a failure before a rank could report is printed, and reported here."""
    try:
        return command()
    except Exception as error:  # such as a torch that cannot be imported
        if isinstance(error, TrainerError):
            print(error.lines(), file=sys.stderr)
        else:
            traceback.print_exc()
        report = termination.failure(error, rank=None, progress={"phase": "start"})
    termination.write(report, termination.destination())
    return int(report["code"])


def end_process(code: int) -> NoReturn:
    """End the process at once.

    With torch imported, the interpreter's ordinary end takes more than a second of CPU time. The pods of a failed
    attempt would hold their devices for that time, and the next attempt waits for these.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter reports it
    os._exit(code)
