"""Python stacks of all ranks, as the launchers of a job take them now, and which ranks are at the same place."""

import time
from collections.abc import Callable

from pydantic import ConfigDict, Field

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.client.ranks import OfAllRanks, expected, parsed_answer
from ddpjob.errors import UnavailableError

Ask = Callable[[str, str], bytes]
"""Sends (method, path) to the launcher of node 0 and returns its answer."""
_SECONDS, _INTERVAL = 20.0, 0.2  # for all launchers to answer; between questions


class RankStacks(WireModel):
    """One process of the training, when its launcher asked for its stacks."""

    model_config = ConfigDict(allow_inf_nan=False)

    rank: int
    """Global rank."""
    node: int
    """node_rank of its node."""
    step: int
    """Its step, as `ddpjob top` shows it."""
    phase: str
    """What it did by its last heartbeat: start, train, save, ..."""
    collective: str
    """The collective in which it waits for the others; empty while it works by itself, or if that is not known."""
    quiet: float
    """Seconds without a heartbeat."""
    stopped: bool
    """A signal or a debugger has stopped the process."""
    answered: bool
    """It has given its stacks. Else it is stopped, starts, is no Python, or waits in the kernel for a device."""
    where: str | None = None
    """file.py:line of the program, in the thread that trains."""
    stacks: str = ""
    """The stacks of all its threads; empty if they are too long for the answer."""

    @property
    def does(self) -> str:
        """What it does, as text."""
        last = f"waits in {self.collective}" if self.collective else f"works in phase {self.phase}"
        if self.answered:
            return last
        return f"{'is stopped' if self.stopped else 'does not answer'}; last, it {last}"


class StackTable(OfAllRanks):
    """The stacks of the ranks of a job."""

    missing_nodes: list[int] = Field(default_factory=list)
    """node_ranks whose launcher has not answered."""
    omitted_ranks: int = 0
    """Ranks that are left out because there are too many."""
    ranks: list[RankStacks]
    """By rank; without those that have ended."""

    @property
    def groups(self) -> list[list[RankStacks]]:
        """The ranks by what they do and where, the largest group first."""
        found: dict[tuple[str, str | None], list[RankStacks]] = {}
        for rank in self.ranks:
            found.setdefault((rank.does, rank.where), []).append(rank)
        return sorted(found.values(), key=len, reverse=True)


def take_stacks(head: Json, ask: Ask) -> StackTable:
    """Return the stacks, when all launchers have answered or have had the time for it.

    Args:
        head: the fields of the table that are known of the job.
    """
    end, job = time.monotonic() + _SECONDS, str(head["job"])
    asked = parsed_answer(job, ask("POST", "stacks"))
    while True:
        with expected(job):
            path = f"stacks/{int(asked['number'])}"
        answer = parsed_answer(job, ask("GET", path))
        with expected(job):
            if "ranks" in answer:
                return StackTable.model_validate({**answer, **head})
        if time.monotonic() >= end:
            raise UnavailableError(
                f"the launcher of node 0 of {job} has taken no stacks in {_SECONDS:g} s",
                "its ranks end or start again, or the machine is overloaded",
                f"ddpjob top {job}, or ddpjob why {job}",
            )
        time.sleep(_INTERVAL)
