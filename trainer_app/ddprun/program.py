"""What the launcher runs in each rank: the interface between a trainer and the launcher."""

from dataclasses import dataclass
from typing import Protocol

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks


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
    """A trainer. Its instances are pickled for ``--how spawn``, so the class is defined at the top of a module."""

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
