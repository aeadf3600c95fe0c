"""Reports a stall of the group once, and withdraws the report when it ends. Nothing is ended because of it.

A node whose rank stalls asks all nodes for the states and stacks of their ranks (``peers``). Node 0 compares them,
names the rank that the others wait for, and shows it in its log and in the progress report. A node that cannot reach
node 0 reports its own ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from ddprun.files import Json
from ddprun.heartbeat import RETURNED
from ddprun.launcher.hang_detector import HangDetector, RankSnapshot, hang_report
from ddprun.launcher.lives import listed
from ddprun.launcher.look_inside import LookInside
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.node_reports import NodeReports
from ddprun.launcher.peers import NodeFindings, Peers
from ddprun.launcher.processes import WorkerProcess, launcher_line
from ddprun.reporting.termination import Report

_LONGEST_STACKS = 65536  # characters of one rank that are passed on to node 0
_PRINTED_RANKS = 16
_LONGEST_MESSAGE = 2000  # characters; places in the code come from other nodes


class StallWatch:
    """One node's part.

    Args:
        look: what clients ask for.
        nodes: of the group.
        is_told_to_stop: whether a stop signal has come, which comes before the files of a stall.

    Attributes:
        states: of this node's ranks, when they were inspected last because of a stall.
    """

    def __init__(
        self,
        detector: HangDetector,
        peers: Peers,
        progress: NodeProgress,
        reports: NodeReports | None,
        look: LookInside,
        *,
        nodes: int,
        is_told_to_stop: Callable[[], bool],
    ) -> None:
        self._detector, self._peers, self._progress = detector, peers, progress
        self._reports, self._nodes, self._is_told_to_stop = reports, nodes, is_told_to_stop
        self._look = look
        self._asked = False  # this node waits for the others
        self._own: NodeFindings | None = None  # since the first request
        self._is_known = False  # this stall was reported, or is none that is reported
        self._since: float | None = None  # when this launcher said that there is a stall, by time.monotonic
        self.states: list[RankSnapshot] = []

    @property
    def is_busy(self) -> bool:
        """Whether an inspection is under way."""
        return self._asked or self._own is not None

    @property
    def _is_look(self) -> bool:
        """Whether the inspection is for a client alone: it writes no file, and nobody is blamed for what it shows."""
        return self._peers.is_look and not self._peers.stalled

    def ask(self, *, is_look: bool = False) -> None:
        """Make all nodes inspect their ranks; ``turn`` carries on, until the watch is no longer busy.

        Args:
            is_look: only because a client wants the stacks.
        """
        if not self.is_busy:
            self._asked = True
            self._peers.ask(is_look=is_look)

    def turn(self, workers: Sequence[WorkerProcess], *, ending: bool) -> None:
        """Do what is to be done now. Call it after ``HangDetector.stalled``.

        Args:
            ending: the ranks of this node end, so a pause of theirs is no stall.
        """
        peers = self._peers
        peers.handle()
        stalled = bool(self._detector.stalled_ranks) and not ending
        median = None if ending else self._detector.pauses.get(0)
        self._progress.pause = None if median is None else {"stepSeconds": float(f"{median:.3g}")}
        if not ending:
            peers.tell_stalled(stalled)
        if stalled and not self._is_known:
            self.ask()
        elif self._look.wants_stacks and not ending:
            self.ask(is_look=True)
        if peers.is_asked:
            self._inspect(workers)
        if self.is_busy and peers.is_settled:
            found = self._own or self._inspect(workers)  # none if node 0 cannot be reached
            self._asked, self._own = False, None
            self._finish(found, workers)
        if peers.said:
            self._show(peers.said)
            peers.said = ""
        is_over = not peers.stalled if peers.is_leader or peers.is_alone else peers.is_over
        if self._is_known and is_over and not ending:
            self.withdraw()

    def cause(self, workers: Sequence[WorkerProcess]) -> Report | None:
        """Return the report of a failure of which a rank of this node is the cause, because it is stalled until now.

        Its peers fail when their collectives time out, or hang, and that does not say whom they waited for.
        """
        if not self.states or (self._since is None and not self._is_hung(workers)):
            return None
        longest = max(int(state.quiet) for state in self.states)
        report = hang_report(self.states, timeout=longest, all_ranks=self._nodes == 1)
        return report if report["cause"] == "own" else None

    def _is_hung(self, workers: Sequence[WorkerProcess]) -> bool:
        """Whether a rank has made no progress since an inspection that found it hung, or nearly.

        A rank may be allowed more time than its peers have, where they may have to wait for a save.
        """
        now = {worker.rank: worker.diagnostics.last_heartbeat() for worker in workers}
        places = {rank: (last.step, last.phase, last.collectives) for rank, last in now.items()}
        quiet = [s.quiet for s in self.states if places.get(s.rank) == (s.step, s.phase, s.collectives)]
        return 0 < self._detector.timeout <= 2 * max(quiet, default=0.0)

    def _inspect(self, workers: Sequence[WorkerProcess]) -> NodeFindings:
        states = self._detector.snapshots(workers)
        if not self._is_look:
            self.states = states
        stacks = {worker.rank: worker.diagnostics.dumps()[0][:_LONGEST_STACKS] for worker in workers}
        own = NodeFindings(self._peers.node, states, stacks)
        self._own = own
        self._peers.give(own)
        return own

    def _finish(self, own: NodeFindings, workers: Sequence[WorkerProcess]) -> None:
        """Report what was found, unless the stall has ended or was reported before."""
        peers = self._peers
        if not self._is_look:  # it may have become an inspection of a stall
            self.states = own.ranks
        reports = (peers.is_leader or peers.is_alone) and bool(peers.stalled) and not self._is_known
        findings = peers.findings() if peers.is_leader else [own]
        states = [state for found in findings for state in found.ranks]
        self._look.take(findings)
        message = ""
        if reports and states and (_is_stall(states) or self._detector.nears_deadline):
            all_ranks = len({state.node for state in states}) == self._nodes
            longest = int(max(self._detector.longest_pause, *(state.quiet for state in states)))
            report = hang_report(states, timeout=longest, all_ranks=all_ranks)
            message = ("" if report["phase"] == RETURNED else "stalled: ") + report["message"][:_LONGEST_MESSAGE]
            if missing := sorted(set(range(self._nodes)) - {state.node for state in states}):
                message += f"; no answer of node {listed(missing)}"
            if peers.is_leader:
                self._progress.stall = _in_progress_report(report, message)
        if peers.is_leader:
            peers.settle(message)  # before the files are written: the others may have a hung rank to end
        self._is_known |= bool(peers.stalled)  # also if it is not reported, or was before: ask no more
        where = None
        if self._reports and not self._is_look and self._reports.write_stall(findings, workers, self._is_told_to_stop):
            where = self._reports.folder
        if message:
            self._show(message)
            for line in [f"the stacks are in {where}"] if where else _stack_lines(findings):
                launcher_line(line)

    def _show(self, message: str) -> None:
        launcher_line(f"warning: {message}")
        self._is_known, self._since = True, time.monotonic()

    def withdraw(self) -> None:
        """Take the report back, if there is one: the ranks make steps again, or have ended without a failure."""
        if not self._is_known:
            return
        if self._peers.is_leader:
            self._peers.tell_over()
        self._progress.stall = None
        if self._since is not None:
            launcher_line(f"the stall has ended, {time.monotonic() - self._since:.0f} s after it was reported")
        self._is_known, self._since, self._peers.is_over = False, None, False


def _is_stall(states: Sequence[RankSnapshot]) -> bool:
    """Return whether a rank waits for its peers, or was making steps; other programs may do nothing for as long.

    Or whether all ranks have returned from their scripts, and their processes do not end.
    """
    returned = [state.phase == RETURNED and not state.collective for state in states]
    return all(returned) or any(s.collective or (s.step and s.phase != RETURNED) for s in states)


def _in_progress_report(report: Report, message: str) -> Json:
    return {name: report[name] for name in ("rank", "step", "phase", "where")} | {"message": message}


def _stack_lines(findings: Sequence[NodeFindings]) -> Iterator[str]:
    """Yield the stacks for the log, where no directory takes them."""
    stacks = sorted((rank, text) for found in findings for rank, text in found.stacks.items() if text)
    for rank, text in stacks[:_PRINTED_RANKS]:
        yield f"stacks of rank {rank}:"
        yield from text.splitlines()
    if len(stacks) > _PRINTED_RANKS:
        yield f"the stacks of {len(stacks) - _PRINTED_RANKS} more ranks are left out; --log-dir takes all"
