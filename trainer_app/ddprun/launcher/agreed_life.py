"""What the launchers agree on one life of the ranks: the supervisor's side of the agreement."""

import time
from collections.abc import Callable, Sequence

from ddprun.launcher.agreement import Agreement
from ddprun.launcher.hang_detector import WorkMeter
from ddprun.launcher.life_messages import VERSION, Failure
from ddprun.launcher.lives import (
    EndRanks,
    Exit,
    LeaveAlone,
    OtherVersion,
    RanksDone,
    RanksEnded,
    RanksFailed,
    RanksWork,
    StartRanks,
    ToldToStop,
)
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.processes import WorkerProcess
from ddprun.reporting.termination import Report

_WORK_INTERVAL = 2.0  # seconds between looks at whether the ranks of a later life work


class AgreedLife:
    """One life, which its supervisor tells what happens to its ranks, and which says what is agreed on.

    Attributes:
        number: of the life.
        next_life: what follows the end of the ranks; None for no restart in place.
        exit: why the attempt ends; None if it does not, or not by the agreement.
        must_end: the ranks are to end, and ``ended`` is to be called when none is left.
    """

    def __init__(
        self, agreement: Agreement | None, number: int, nnodes: int, progress: NodeProgress, say: Callable[[str], None]
    ) -> None:
        """Take part in the agreement; without one, nothing follows the end of the ranks."""
        self._agreement, self._nnodes, self._progress, self._say = agreement, nnodes, progress, say
        self._work, self._next_look = WorkMeter(), 0.0
        self.number = number
        self.next_life: StartRanks | None = None
        self.exit: Exit | None = None
        self.must_end = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be agreed on."""
        return self._agreement is None or self._agreement.is_over

    @property
    def is_released(self) -> bool:
        """Whether each node ends by itself; while ranks run, because all of another node have succeeded."""
        return self._agreement is not None and self._agreement.is_over

    @property
    def has_joined(self) -> bool:
        """Whether the leader decides what follows a failure."""
        return self._agreement is not None and self._agreement.has_joined

    @property
    def longest_wait(self) -> float:
        """Seconds until ``turn`` is to be called again."""
        return self._agreement.longest_wait if self._agreement else float("inf")

    def failed(self, report: Report) -> None:
        """Tell that a rank of this node has failed, and why."""
        if self._agreement:
            failure = Failure.of_report(report)
            self._tell_progress(self._agreement)
            self._agreement.tell(RanksFailed(self._agreement.number, failure))

    def succeeded(self) -> None:
        """Tell that all ranks of this node have succeeded."""
        if self._agreement:
            self._agreement.tell(RanksDone(self._agreement.number))

    def ended(self, *, healthy: bool, failure: Failure | None) -> None:
        """Tell that no process of this life is left, or that some are."""
        self.must_end = False
        if self._agreement:
            self._agreement.tell(RanksEnded(self._agreement.number, healthy, failure))

    def told_to_stop(self) -> None:
        """Tell that a stop signal has come."""
        if self._agreement:
            self._agreement.tell(ToldToStop())

    def turn(self, workers: Sequence[WorkerProcess]) -> bool:
        """Hear what the launchers of the group agree on. Returns whether the ranks are to be killed."""
        agreement = self._agreement
        if agreement is None:
            return False
        was_complete = agreement.is_complete
        if agreement.turn():
            self._tell_progress(agreement)
            self._tell_work(agreement, workers)
        if agreement.is_complete and not was_complete:
            self._say(f"all {self._nnodes} launchers take part in restarts in place")
        return self.obey()

    def obey(self) -> bool:
        """Take what is agreed on this life; what follows its end is for the next one. Returns as ``turn``."""
        kills, agreement = False, self._agreement
        while agreement and agreement.orders and self.next_life is None:
            match order := agreement.orders.popleft():
                case EndRanks():
                    self.must_end = kills = True
                case Exit():
                    self.exit, kills = order, True
                case StartRanks():
                    self.next_life = order
                case LeaveAlone() if order.reason:
                    ends = "this attempt ends on all nodes, and a new one follows if the job has restarts left"
                    self._say(f"no restart in place: {order.reason}; {ends}")
                case OtherVersion():
                    self._say(
                        f"warning: no restarts in place: node {order.node} has another version of ddprun (its launcher "
                        f"speaks version {order.version}, this one {VERSION}); a failure ends the attempt"
                    )
        return kills

    def _tell_progress(self, agreement: Agreement) -> None:
        if (mark := self._progress.mark()) is not None:
            agreement.progressed(self.number, mark)  # the next one may have been agreed on already

    def _tell_work(self, agreement: Agreement, workers: Sequence[WorkerProcess]) -> None:
        """Tell whether ranks of a later life work before their first step, such as on a large checkpoint."""
        if self.number == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _WORK_INTERVAL
        running = [worker for worker in workers if worker.status is None]
        if all(worker.diagnostics.last_heartbeat().step == 0 for worker in running) and self._work.has_grown(running):
            agreement.tell(RanksWork(self.number))
