"""Who kept the others waiting: the ranks of a node, or of all nodes, as they were seen at the moment of a hang.

``watchdog`` sees, ``supervise`` asks when its node hangs; ``why`` asks again with what all nodes have left.

The launcher's eye on its ranks: which of them shows no sign of life, and what can still be learned of them.

A stopped rank cannot report itself, and what its peers see is only that a collective does not end. The launcher sees
all: it compares breadcrumbs, asks for stacks by signal, and ``find_hung_rank`` says who keeps the others waiting.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import Hang
from ddptrain.heartbeat import DUMP_SIGNAL, HeartbeatRecord, StallTimer, training_frame
from ddptrain.launcher.processes import WorkerProcess
from ddptrain.reporting import termination


@dataclass(frozen=True)
class RankState:
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


def find_hung_rank(rank_states: Sequence[RankState], *, all_ranks: bool) -> RankState | None:
    """The rank that the others wait for; None where all of these only wait, and another node must know.

    Args:
        all_ranks: these are all ranks, not only one node's. What is missing here could otherwise be elsewhere.
    """
    if not rank_states:
        return None
    if stopped := [s for s in rank_states if s.stopped]:
        return min(stopped, key=_progress)
    quiet = max(s.quiet for s in rank_states) / 2  # a rank that still moves keeps nobody waiting
    if alone := [s for s in rank_states if not s.collective and s.quiet >= quiet]:
        return min(alone, key=_progress)
    if silent := [s for s in rank_states if not s.answered]:
        return min(silent, key=_progress)
    behind = min(rank_states, key=lambda s: s.collectives)
    if all_ranks and behind.collectives < max(s.collectives for s in rank_states):
        return behind
    return None


def _progress(rank_state: RankState) -> tuple[int, int]:
    return rank_state.collectives, rank_state.step


def hang_report(rank_states: Sequence[RankState], *, timeout: float, all_ranks: bool) -> dict[str, Any]:
    """Return the termination report of a hung node, code 76; cause ``peer`` if none of its ranks is to blame."""
    guilty = find_hung_rank(rank_states, all_ranks=all_ranks)
    others = [s for s in rank_states if s is not guilty]
    waiting = "; ".join(f"rank {s.rank} waits {s.place}" for s in others[:4])
    if guilty:
        state = "is stopped" if guilty.stopped else "shows no sign of life"
        message = f"rank {guilty.rank} (node {guilty.node}) {state} {guilty.place}, {timeout:g} s without progress"
    else:
        message = f"{timeout:g} s without progress, and no rank of this node is to blame"
    shown = guilty or min(rank_states, key=_progress)
    return termination.failed(
        Hang.code,
        "Hang",
        f"{message}; {waiting}" if waiting else message,
        rank=shown.rank,
        cause="own" if guilty or all_ranks else "peer",
        exception="Hang",
        progress={"step": shown.step, "phase": shown.collective or shown.phase},
        where=shown.where,
    )


_ANSWERING = 2.0  # seconds for dumps to arrive
_STOPPED = ("T", "t")


class Watchdog:
    """Counts, for each rank, how long its breadcrumbs have stood still.

    Args:
        timeout: seconds without a change that make a hang.
        node_rank: of these ranks.
    """

    def __init__(self, timeout: float, node_rank: int) -> None:
        self.timeout, self._node_rank = timeout, node_rank
        self.interval = min(1.0, timeout / 10)
        self._ranks: dict[int, StallTimer] = {}

    def stalled(self, children: Sequence[WorkerProcess]) -> bool:
        """True once a living rank has stood still for the timeout. To be asked every ``interval`` seconds."""
        for child in children:
            if child.status is not None or child.diagnostics is None:
                self._ranks.pop(child.rank, None)
                continue
            self._ranks.setdefault(child.rank, StallTimer(self.interval)).look(child.diagnostics.crumb().changes)
        return any(rank.seconds >= self.timeout for rank in self._ranks.values())

    def _quiet(self, child: WorkerProcess) -> float:
        rank = self._ranks.get(child.rank)
        return rank.seconds if rank else 0.0

    def examine(self, children: Sequence[WorkerProcess]) -> list[RankState]:
        """Ask every living rank for its stacks and flight recorder, wait a moment, and write down what there is.

        Empty if a rank that stood still has moved meanwhile.
        """
        living = [child for child in children if child.status is None and child.diagnostics is not None]
        states = {child.rank: process_state(child.pid) for child in living}
        heartbeat = {child.rank: child.diagnostics.crumb() for child in living if child.diagnostics}
        for child in living:
            assert child.diagnostics is not None
            child.diagnostics.forget()  # of a false alarm
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, DUMP_SIGNAL)
        able = [child for child in living if states[child.rank] not in _STOPPED]
        end = time.monotonic() + _ANSWERING
        while (
            not all(child.diagnostics and all(child.diagnostics.texts()) for child in able) and time.monotonic() < end
        ):
            time.sleep(0.05)
        still = [child for child in living if self._quiet(child) >= self.timeout / 2]
        if any(
            child.diagnostics and child.diagnostics.crumb().changes != heartbeat[child.rank].changes for child in still
        ):
            return []  # they woke up, or another node has just ended its hung rank
        return [self._sighting(child, heartbeat[child.rank], states[child.rank]) for child in living]

    def _sighting(self, child: WorkerProcess, crumb: HeartbeatRecord, state: str) -> RankState:
        assert child.diagnostics is not None
        stacks, _ = child.diagnostics.texts()
        return RankState(
            rank=child.rank,
            node=self._node_rank,
            step=crumb.step,
            phase=crumb.phase,
            collective=crumb.collective,
            collectives=crumb.collectives,
            quiet=round(self._quiet(child), 1),
            stopped=state in _STOPPED,
            answered=bool(stacks),
            where=training_frame(stacks),
        )


def process_state(pid: int) -> str:
    """One letter as in proc(5): R running, S sleeping, D waiting for a disk, T stopped; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
