"""Detects that a node hangs and finds the rank that its peers wait for.

The launcher observes the heartbeats of its ranks. When one stalls, it requests the stacks of every rank and compares
the states of all ranks: a stopped rank cannot report itself, and its peers only see that a collective does not end.
``node_reports`` repeats the comparison with the states that all nodes have written.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddprun.diagnostics import DUMP_SIGNAL, collective_of, training_frame
from ddprun.errors import Hang
from ddprun.heartbeat import StallTimer, activity
from ddprun.launcher.processes import WorkerProcess
from ddprun.reporting import termination
from ddprun.reporting.termination import Report

_DUMPING = 2.0  # seconds for dumps to arrive
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class RankSnapshot:
    """One rank at the moment of the hang. The field names are those of ``reports/*/node-N.json``.

    Attributes:
        collective: what it waits in; empty while it works by itself.
        collectives: how many it has begun; a rank that has begun fewer keeps its peers waiting.
        quiet: seconds without a heartbeat.
        stopped: the process is stopped by a signal or a debugger.
        answered: it could still dump its stacks.
        where: ``file.py:line`` from the stacks.
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
        """Return what the rank was doing, as text."""
        at = f" at {self.where}" if self.where else ""
        return f"{activity(self.phase, self.collective)} of step {self.step}{at}"


def find_hung_rank(states: Sequence[RankSnapshot], *, all_ranks: bool) -> RankSnapshot | None:
    """Return the rank that its peers wait for; None if all of these wait and the cause is on another node.

    Args:
        all_ranks: ``states`` holds every rank, not those of one node only, so that the slowest of them is the cause.
    """
    if not states:
        return None
    if stopped := [s for s in states if s.stopped]:
        return min(stopped, key=_progress)
    quiet = max(s.quiet for s in states) / 2  # a rank whose heartbeat still changes keeps no peer waiting
    if working := [s for s in states if not s.collective and s.quiet >= quiet]:
        return min(working, key=_progress)
    if silent := [s for s in states if not s.answered]:
        return min(silent, key=_progress)
    behind = min(states, key=lambda s: s.collectives)
    if all_ranks and behind.collectives < max(s.collectives for s in states):
        return behind
    return None


def _progress(state: RankSnapshot) -> tuple[int, int]:
    return state.collectives, state.step


def hang_report(states: Sequence[RankSnapshot], *, timeout: float, all_ranks: bool) -> Report:
    """Return the termination report of a hung node; its cause is ``peer`` if none of its ranks is the cause."""
    hung = find_hung_rank(states, all_ranks=all_ranks)
    waiting = "; ".join(f"rank {s.rank} waits {s.place}" for s in [s for s in states if s is not hung][:4])
    shown = hung or min(states, key=_progress)
    message = f"rank {shown.rank} (node {shown.node}) %s {shown.place}, {timeout:g} s without progress"
    if hung and hung.stopped:
        message, hint = message % "is stopped", "a signal or a debugger has stopped the process"
    elif hung:
        message %= "shows no sign of life"
        hint = "a file system or a lock that does not answer, collectives in another order, or work that takes longer"
    elif all_ranks:
        message = f"{timeout:g} s without progress, and no rank is the cause"
        hint = "all ranks wait in the same collective: the network between them, or the backend, does not answer"
    else:
        message = f"{timeout:g} s without progress, and no rank of this node is the cause"
        hint = "the launcher of another node reports the rank that hangs"
    error = Hang(
        f"{message}; {waiting}" if waiting else message,
        hint=hint,
        next_step="`ddprun --why DIR`, with the checkpoint or log directory, shows every rank; "
        "raise --hang-timeout for work that takes longer",
    )
    error.cause = "own" if hung or all_ranks else "peer"
    place = {"step": shown.step, "phase": shown.collective or shown.phase}
    return termination.failure(error, rank=shown.rank, progress=place) | {"where": shown.where}


class HangDetector:
    """Measures, for each rank of this node, how long its heartbeat has not changed.

    Args:
        timeout: seconds without a change that make a hang, unless the heartbeat has a larger limit.
    """

    def __init__(self, timeout: float, node_rank: int) -> None:
        self.timeout, self._node_rank = timeout, node_rank
        self.interval = min(1.0, timeout / 10)
        self._stalls: dict[int, StallTimer] = {}

    def stalled(self, workers: Sequence[WorkerProcess]) -> bool:
        """Return whether a running rank has stalled for its timeout. Call it every ``interval`` seconds."""
        stalled = False
        for worker in workers:
            if worker.status is not None:
                self._stalls.pop(worker.rank, None)
                continue
            stall = self._stalls.setdefault(worker.rank, StallTimer(self.interval))
            record = worker.diagnostics.last_heartbeat()
            stalled |= stall.observe(record.changes) >= max(self.timeout, record.limit)
        return stalled

    def inspect(self, workers: Sequence[WorkerProcess]) -> list[RankSnapshot]:
        """Ask every running rank for its dumps, wait for them, and return the ranks' states.

        Empty if a stalled rank has moved meanwhile: it was slow, or another node has just ended its hung rank.
        """
        running = [worker for worker in workers if worker.status is None]
        before = {worker.rank: (worker.diagnostics.last_heartbeat(), process_state(worker.pid)) for worker in running}
        for worker in running:
            worker.diagnostics.clear_dumps()  # of an earlier false alarm
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, DUMP_SIGNAL)
        able = [worker for worker in running if before[worker.rank][1] not in _STOPPED]
        end = time.monotonic() + _DUMPING
        while not all(all(worker.diagnostics.dumps()) for worker in able) and time.monotonic() < end:
            time.sleep(0.05)
        for worker in running:
            moved = worker.diagnostics.last_heartbeat().changes != before[worker.rank][0].changes
            if moved and self._quiet(worker) >= self.timeout / 2:
                return []
        snapshots = []
        for worker in running:
            (record, process), (stacks, _) = before[worker.rank], worker.diagnostics.dumps()
            snapshots.append(
                RankSnapshot(
                    worker.rank, self._node_rank, record.step, record.phase,
                    record.collective or ("" if worker.sends_an_ending else collective_of(stacks)), record.collectives,
                    quiet=round(self._quiet(worker), 1), stopped=process in _STOPPED, answered=bool(stacks),
                    where=training_frame(stacks),
                )
            )  # fmt: skip
        return snapshots

    def _quiet(self, worker: WorkerProcess) -> float:
        stall = self._stalls.get(worker.rank)
        return stall.seconds if stall else 0.0


def process_state(pid: int) -> str:
    """Return the state letter of proc(5): R running, S sleeping, D disk wait, T stopped; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
