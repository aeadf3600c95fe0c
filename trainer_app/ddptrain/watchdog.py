"""The launcher's eye on its ranks: which of them shows no sign of life, and what can still be learned of them.

A stopped rank cannot report itself, and what its peers see is only that a collective does not end. The launcher sees
all: it compares breadcrumbs, asks for stacks by signal, and ``culprit`` says who keeps the others waiting.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ddptrain.blackbox import DUMP_SIGNAL, place_in
from ddptrain.breadcrumbs import Crumb, Stillness
from ddptrain.culprit import Sighting
from ddptrain.node import Child

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
        self._ranks: dict[int, Stillness] = {}

    def stalled(self, children: Sequence[Child]) -> bool:
        """True once a living rank has stood still for the timeout. To be asked every ``interval`` seconds."""
        for child in children:
            if child.status is not None or child.box is None:
                self._ranks.pop(child.rank, None)
                continue
            self._ranks.setdefault(child.rank, Stillness(self.interval)).look(child.box.crumb().changes)
        return any(rank.seconds >= self.timeout for rank in self._ranks.values())

    def _quiet(self, child: Child) -> float:
        rank = self._ranks.get(child.rank)
        return rank.seconds if rank else 0.0

    def examine(self, children: Sequence[Child]) -> list[Sighting]:
        """Ask every living rank for its stacks and flight recorder, wait a moment, and write down what there is.

        Empty if a rank that stood still has moved meanwhile.
        """
        living = [child for child in children if child.status is None and child.box is not None]
        states = {child.rank: process_state(child.pid) for child in living}
        crumbs = {child.rank: child.box.crumb() for child in living if child.box}
        for child in living:
            assert child.box is not None
            child.box.forget()  # of a false alarm
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, DUMP_SIGNAL)
        able = [child for child in living if states[child.rank] not in _STOPPED]
        end = time.monotonic() + _ANSWERING
        while not all(child.box and all(child.box.texts()) for child in able) and time.monotonic() < end:
            time.sleep(0.05)
        still = [child for child in living if self._quiet(child) >= self.timeout / 2]
        if any(child.box and child.box.crumb().changes != crumbs[child.rank].changes for child in still):
            return []  # they woke up, or another node has just ended its culprit: this was no hang, or is none now
        return [self._sighting(child, crumbs[child.rank], states[child.rank]) for child in living]

    def _sighting(self, child: Child, crumb: Crumb, state: str) -> Sighting:
        assert child.box is not None
        stacks, _ = child.box.texts()
        return Sighting(
            rank=child.rank,
            node=self._node_rank,
            step=crumb.step,
            phase=crumb.phase,
            collective=crumb.collective,
            collectives=crumb.collectives,
            quiet=round(self._quiet(child), 1),
            stopped=state in _STOPPED,
            answered=bool(stacks),
            where=place_in(stacks),
        )


def process_state(pid: int) -> str:
    """One letter as in proc(5): R running, S sleeping, D waiting for a disk, T stopped; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
