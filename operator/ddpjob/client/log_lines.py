"""The lines that the nodes of a job printed: which rank printed them, and of which nodes and ranks they are shown."""

import math
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ddpjob.api.model import WireModel
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError

RANK_PREFIX = re.compile(r"\[n\d+r(\d+)\] ")
"""Before each line of a rank of ddprun."""
_TORCHRUN_PREFIX = re.compile(r"\[default(\d+)\]:")  # with --tee: the rank on its node


@dataclass(frozen=True)
class LogLine:
    """One line that a node printed.

    node: node rank. attempt: number of the attempt. rank: the process that printed it; None if several run on the node
    and the line does not say which.
    text: the line as it was printed, without the line feed; it may contain escape sequences.
    unfinished: what a line shows now that the program draws again, as a progress bar; the whole line follows later.
    """

    node: int
    rank: int | None
    attempt: int
    text: str
    unfinished: bool = False


@dataclass(frozen=True)
class LogChoice:
    """Which lines of the logs of a job are wanted. Fields: see ``Client.logs``."""

    nodes: Collection[int] | None = None
    all_nodes: bool = False
    attempt: int | None = None
    tail: int | None = None
    since: float | None = None

    def of_attempt(self, job: DDPJob, attempt: int, failed: Collection[int] = ()) -> Collection[int]:
        """Return the nodes; without a choice these are node 0, and those that failed in the attempt."""
        if self.nodes is not None:
            return self.nodes
        recorded = job.status.failures or ()
        return {0, *failed, *(f.node_rank for f in recorded if f.attempt == attempt and f.node_rank is not None)}


class PrintedLine(WireModel):
    """One line of the output of `ddpjob logs -o json`."""

    node: int
    """Rank of the node."""
    rank: int | None = None
    """Global rank of the process; absent if several run on the node and the line does not say which printed it."""
    attempt: int
    """The attempt that printed it."""
    line: str
    """The line as a terminal shows it: the last state of a progress bar, no escape sequences, no prefix of ddprun."""


def log_line(node: int, attempt: int, text: str, nproc_per_node: int | None, *, unfinished: bool = False) -> LogLine:
    """Return a line of a node with the rank that printed it."""
    rank = node if nproc_per_node == 1 else None
    if (prefix := RANK_PREFIX.match(text)) is not None:
        rank = int(prefix.group(1))
    elif (prefix := _TORCHRUN_PREFIX.match(text)) is not None and nproc_per_node:
        rank = node * nproc_per_node + int(prefix.group(1))
    return LogLine(node, rank, attempt, text, unfinished)


class Redrawn:
    """A line that its program draws again, as a progress bar does: what it shows is returned at most once in a time."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._shown = b""
        self._time = -math.inf

    def now(self, begun: bytes) -> bytes | None:
        """Return what the begun line shows; None if it is no such line, unchanged, or was shown a moment ago."""
        state = begun.rstrip(b"\r").rpartition(b"\r")[2]
        if b"\r" not in begun or state == self._shown or time.monotonic() < self._time + self._seconds:
            return None
        self._shown, self._time = state, time.monotonic()
        return state


def nodes_of(job: DDPJob, ranks: Collection[int]) -> set[int] | None:
    """Return the nodes of some ranks; None if it is not known how many ranks a node has."""
    world = job.status.world
    nproc = world.nproc_per_node if world else job.manifest["spec"].get("nprocPerNode")
    return {rank // nproc for rank in ranks} if isinstance(nproc, int) else None


def of_ranks(lines: Iterator[LogLine], job: DDPJob, ranks: Collection[int]) -> Iterator[LogLine]:
    """Yield the lines of some ranks. Raises ``DDPJobError`` if there are lines, and none says which rank printed it."""
    is_known, is_empty = False, True
    for line in lines:
        is_known, is_empty = is_known or line.rank is not None, False
        if line.rank in ranks:
            yield line
    if not is_known and not is_empty:
        raise DDPJobError(
            f"the lines of {job.name} do not say which rank printed them",
            "ddprun puts the rank before each line, and so does torchrun --tee 3",
            f"ddpjob logs {job.name} --node N shows the lines of a node",
        )
