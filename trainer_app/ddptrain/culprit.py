"""Who kept the others waiting: the ranks of a node, or of all nodes, as they were seen at the moment of a hang.

``watchdog`` sees, ``supervise`` asks when its node hangs; ``why`` asks again with what all nodes have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain.errors import Hang


@dataclass(frozen=True)
class Sighting:
    """One rank at the moment of the hang.

    Attributes:
        collective: what it waits in; empty while it works by itself.
        collectives: how many it has begun; the peers of one that has begun fewer wait for it.
        quiet: seconds without a sign of life.
        stopped: the process is stopped by a signal or a debugger.
        answered: it could still dump its stacks.
        where: ``file.py:line``, if it could.
    """

    rank: int
    node: int
    step: int
    phase: str
    collective: str
    collectives: int
    quiet: float
    stopped: bool
    answered: bool
    where: str | None

    @property
    def place(self) -> str:
        """What it was doing, in words."""
        doing = f"in {self.collective}" if self.collective else f"in phase {self.phase}"
        at = f" at {self.where}" if self.where else ""
        return f"{doing} of step {self.step}{at}"


def culprit(sightings: Sequence[Sighting], *, everybody: bool) -> Sighting | None:
    """The rank that the others wait for; None where all of these only wait, and another node must know.

    Args:
        everybody: these are all ranks, not only one node's. What is missing here could otherwise be elsewhere.
    """
    if not sightings:
        return None
    if stopped := [s for s in sightings if s.stopped]:
        return min(stopped, key=_progress)
    quiet = max(s.quiet for s in sightings) / 2  # a rank that still moves keeps nobody waiting
    if alone := [s for s in sightings if not s.collective and s.quiet >= quiet]:
        return min(alone, key=_progress)
    if silent := [s for s in sightings if not s.answered]:
        return min(silent, key=_progress)
    behind = min(sightings, key=lambda s: s.collectives)
    if everybody and behind.collectives < max(s.collectives for s in sightings):
        return behind
    return None


def _progress(sighting: Sighting) -> tuple[int, int]:
    return sighting.collectives, sighting.step


def hang_report(sightings: Sequence[Sighting], *, timeout: float, everybody: bool) -> dict[str, Any]:
    """The termination report of a node that hangs, code 76; its cause is ``peer`` where no rank of it is to blame."""
    guilty = culprit(sightings, everybody=everybody)
    others = [s for s in sightings if s is not guilty]
    waiting = "; ".join(f"rank {s.rank} waits {s.place}" for s in others[:4])
    if guilty:
        state = "is stopped" if guilty.stopped else "shows no sign of life"
        message = f"rank {guilty.rank} (node {guilty.node}) {state} {guilty.place}, {timeout:g} s without progress"
    else:
        message = f"{timeout:g} s without progress, and no rank of this node is to blame"
    shown = guilty or min(sightings, key=_progress)
    return {
        "schema": 1,
        "outcome": "failed",
        "code": Hang.code,
        "cause": "own" if guilty or everybody else "peer",
        "rank": shown.rank,
        "step": shown.step,
        "phase": shown.collective or shown.phase,
        "signal": None,
        "exception": "Hang",
        "message": f"{message}; {waiting}" if waiting else message,
        "where": shown.where,
        "checkpoint": None,
    }
