"""Detects that a node hangs and finds the rank that its peers wait for.

The launcher observes the heartbeats of its ranks. When one stalls, it requests the stacks of every rank and compares
the states of all ranks: a stopped rank cannot report itself, and its peers only see that a collective does not end.
``node_reports`` repeats the comparison with the states that all nodes have written.
"""

import contextlib
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddprun import proc
from ddprun.diagnostics import (
    DUMP_SIGNAL,
    collective_of,
    running_frame,
    training_frame,
    unfinished_collective,
)
from ddprun.distributed.topology import number_of
from ddprun.errors import Hang
from ddprun.heartbeat import RETURNED, HeartbeatRecord, StallTimer, activity
from ddprun.launcher.processes import WorkerProcess
from ddprun.reporting import termination
from ddprun.reporting.termination import Report

_DUMPING = 2.0  # seconds for stacks to arrive, and then for the flight recorder
_STOPPED = ("T", "t")
_PAUSES = 2  # a pause is a stall, or is shown, if it is so many times longer than all before it
# It is shown after so many seconds and median steps. The operator asks every 10 s, and of shorter pauses many are the
# collection of garbage, or a batch that comes late.
_SHOWN, _STEPS = 10.0, 10
_MOST_DEADLINE = 10**9  # seconds
_WITHOUT_STEPS = 4  # before the first step, so many times the time that makes a stall later
_INTERRUPTIONS = 20  # of a main thread that does nothing, by requests for dumps among others
LINGERING = 60.0  # seconds in which the process of a rank does nothing after its script has returned
_LITTLE = 0.2  # seconds of CPU in such a time: threads that only look at a clock use less, an upload uses more


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
        if self.phase == RETURNED and not self.collective:
            return f"past the end of its script{at}"
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
    waiting_in = Counter(state.collective for state in states if state.collective)
    # A rank that alone calls another collective is first, among any number of ranks.
    states = sorted(states, key=lambda s: waiting_in[s.collective])
    others = [state for state in states if state is not hung][:4]
    waiting = "; ".join(f"rank {s.rank} {'waits' if s.collective else 'is'} {s.place}" for s in others)
    shown = hung or min(states, key=lambda s: (waiting_in[s.collective], _progress(s)))
    verb = "is stopped" if hung and hung.stopped else "is"
    message = f"rank {shown.rank} (node {shown.node}) {verb} {shown.place}, {timeout:g} s without progress"
    if hung and hung.phase == RETURNED and all(s.phase == RETURNED for s in states):
        at = f" at {hung.where}" if hung.where else ""
        ended = f"has ended its script, and its process has not ended after {timeout:g} s"
        message = f"rank {hung.rank} (node {hung.node}) {ended}{at}"
        waiting, hint = "", "a thread that is no daemon, or an exit handler, still runs or waits"
    elif hung and hung.stopped:
        hint = "a signal or a debugger has stopped the process"
    elif hung:
        hint = "a file system or a lock that does not answer, collectives in another order, or work that takes longer"
    elif all_ranks:
        what = "the ranks wait in different collectives" if len(waiting_in) > 1 else "no rank is the cause"
        message = f"{timeout:g} s without progress, and {what}"
        hint = _why_all_wait(set(waiting_in))
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


def _why_all_wait(collectives: set[str]) -> str:
    if len(collectives) > 1:
        names = ", ".join(sorted(collectives)[:4])
        return f"the ranks wait in different collectives ({names}): they are not called in the same order on all ranks"
    return (
        "all ranks wait in the same collective: the network between them, or the backend, does not answer, or on a GPU "
        "a kernel before the collective does not end"
    )


@dataclass(frozen=True)
class Deadlines:
    """Seconds without a step after which the operator ends the attempt; 0 for never.

    Attributes:
        startup: before the first step. progress: after it.
        completion: also after the last one, when all ranks of another node have succeeded.
    """

    startup: int = 0
    progress: int = 0
    completion: int = 0

    @classmethod
    def of(cls, env: Mapping[str, str], life: int, nodes: int) -> "Deadlines":
        """Return the deadlines in the environment of a pod; the first step of the attempt is that of its first life.

        The deadline after the last step begins with the success of another node.

        Raises:
            UsageError: a variable is no whole number.
        """
        first = "DDPJOB_STARTUP_DEADLINE" if life == 1 else "DDPJOB_PROGRESS_DEADLINE"
        names = (first, "DDPJOB_PROGRESS_DEADLINE", *(("DDPJOB_COMPLETION_GRACE",) if nodes > 1 else ()))
        return cls(*(number_of(env, name, 0, 0, _MOST_DEADLINE) for name in names))


@dataclass
class _Pause:
    """How long a rank has made no progress.

    Attributes:
        beats: without a heartbeat. idle: without work of the main thread. place: in the same step and phase.
        work: of the main thread when it last did something; after the script of all processes, measured then.
        last: the newest heartbeat. longest: of the earlier pauses after the first step.
        paces: seconds of a step, between the last looks. made: steps since the first look.
    """

    beats: StallTimer
    idle: StallTimer
    place: StallTimer
    work: float = -1.0
    measured: float = -math.inf
    last: HeartbeatRecord = field(default_factory=HeartbeatRecord)
    longest: float = 0.0
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    made: int = 0

    def observe(self, record: HeartbeatRecord, looked: float) -> None:
        """Take the newest heartbeat.

        Args:
            looked: when the ranks were looked at before, by time.monotonic.
        """
        before, self.last = self.last, record
        # A step number that goes on from a checkpoint is of one step, and there are no more steps than heartbeats.
        steps = min(record.step - before.step, record.changes - before.changes)
        longest = max(self.longest, self.beats.seconds)
        if self.beats.observe(record.changes) == 0 and before.step > 0:
            self.longest = longest
        self.place.observe((record.step, record.phase))
        if steps > 0:
            self.paces.append((record.time - (before.time if before.step else looked)) / steps)
            self.made += steps

    @property
    def median_step(self) -> float | None:
        """Seconds of a step, if the rank makes none for much longer than that and than in all pauses before."""
        if self.made < _STEPS or not math.isfinite(self.last.limit):
            return None
        median = sorted(self.paces)[len(self.paces) // 2]
        limit = max(_SHOWN, _STEPS * median, self.last.limit, _PAUSES * self.longest)
        return median if self.beats.seconds >= limit else None


class HangDetector:
    """Measures, for each rank of this node, how long its heartbeat has not changed.

    Args:
        timeout: seconds without a change that make a hang, unless the heartbeat has a larger limit; 0 for never.
        report_after: seconds that make a stall, which is only reported; 0 for never.
        deadlines: of the operator: half of such a time without a step is a stall, too, so that the stacks are taken
            and reported before the attempt ends.

    Attributes:
        stalled_ranks: of this node, when it was observed last.
        pauses: of the ranks whose pause is shown although it is no stall yet: the seconds of a step before it.
        is_last: no other node trains: there is none, or all ranks of one have succeeded.
    """

    def __init__(
        self, timeout: float, node_rank: int, report_after: float = 0.0, deadlines: Deadlines | None = None
    ) -> None:
        self.timeout, self._report_after, self._node_rank = timeout, report_after, node_rank
        self._deadlines = deadlines or Deadlines()
        self.interval = min(1.0, *(limit / 10 for limit in (timeout, report_after) if limit), 1.0)
        self._pauses: dict[int, _Pause] = {}
        self._looked = time.monotonic()
        self.stalled_ranks: set[int] = set()
        self.pauses: dict[int, float] = {}
        self.is_last = False

    def stalled(self, workers: Sequence[WorkerProcess]) -> bool:
        """Return whether a running rank hangs. Call it every ``interval`` seconds."""
        hangs, self.stalled_ranks, self.pauses = False, set(), {}
        looked, self._looked = self._looked, time.monotonic()
        for worker in workers:
            if worker.status is not None:
                self._pauses.pop(worker.rank, None)
                continue
            record = worker.diagnostics.last_heartbeat()
            if not (record.changes or worker.sends_an_ending):
                continue  # an executable, or a script that has not begun
            if worker.rank not in self._pauses:
                beats, idle, place = (StallTimer(self.interval) for _ in range(3))
                self._pauses[worker.rank] = _Pause(beats, idle, place)
            pause = self._pauses[worker.rank]
            pause.observe(record, looked)
            hangs |= self.timeout > 0 and pause.beats.seconds >= max(self.timeout, record.limit)
            is_stalled = self._is_stalled(worker, record, pause) or self._is_half_over(pause)
            if self._report_after and is_stalled:
                self.stalled_ranks.add(worker.rank)
            if (median := pause.median_step) is not None:
                self.pauses[worker.rank] = median
        return hangs

    @property
    def longest_pause(self) -> float:
        """Seconds for which a rank of this node has made no step."""
        return max((pause.place.seconds for pause in self._pauses.values()), default=0.0)

    @property
    def nears_deadline(self) -> bool:
        """Whether half of the time has passed after which the operator ends the attempt."""
        return any(map(self._is_half_over, self._pauses.values()))

    def _is_half_over(self, pause: _Pause) -> bool:
        deadlines = self._deadlines
        limits = [deadlines.progress if pause.last.step else deadlines.startup, deadlines.completion * self.is_last]
        return any(0 < limit <= 2 * pause.place.seconds for limit in limits)

    def _is_stalled(self, worker: WorkerProcess, record: HeartbeatRecord, pause: _Pause) -> bool:
        """Return whether the rank has made no step for longer than a test or a save takes.

        Nobody knows how long a program works before its first step and after its last, or whether it makes steps at
        all. There a rank is stalled if its main thread does nothing, for longer.
        """
        if record.step > 0 and math.isfinite(record.limit):
            return pause.beats.seconds >= max(self._report_after, record.limit, _PAUSES * pause.longest)
        work, little = pause.work, 0.0
        if not worker.has_returned:
            work, little = proc.main_thread_work(worker.pid), _INTERRUPTIONS
        elif self._looked >= pause.measured + self.interval:  # other threads may go on
            tree = [*proc.tree(worker.pid)]
            work, little = sum(map(proc.cpu_seconds, tree)), _LITTLE
            if any(map(proc.is_running, tree)):  # or waits for a volume that does not answer
                work = pause.work + 2 * _LITTLE
            pause.measured = self._looked
        if abs(work - pause.work) > little:
            pause.work = work
        idle = min(pause.idle.observe(pause.work), pause.beats.seconds)
        if worker.has_returned and self.is_last:
            return idle >= LINGERING
        return idle >= _WITHOUT_STEPS * self._report_after

    def idle_after_return(self, workers: Sequence[WorkerProcess]) -> float:
        """Return for how many seconds none of the ranks, whose scripts have all returned, has done anything."""
        pauses = [self._pauses.get(worker.rank) for worker in workers if worker.status is None]
        return min((min(p.idle.seconds, p.beats.seconds) if p else 0.0 for p in pauses), default=math.inf)

    def snapshots(self, workers: Sequence[WorkerProcess]) -> list[RankSnapshot]:
        """Ask every running rank for its dumps, wait for them, and return the ranks' states.

        A rank that was killed may take a moment to end, and does not answer: it is not waited for.
        """
        running = [worker for worker in workers if worker.status is None]
        records = {worker.rank: worker.diagnostics.last_heartbeat() for worker in running}
        before = {w.rank: (records[w.rank], proc.state(_trains(w, records[w.rank]))) for w in running}
        asked = [worker for worker in running if not worker.killed_by_us and request_stacks(worker)]
        waited_for = [worker for worker in asked if before[worker.rank][1] not in _STOPPED]
        _wait_until_written(lambda: [worker.diagnostics.dumps()[0] for worker in waited_for])
        # Not earlier: it starts a thread, and the handler that writes the stacks follows the list of all threads.
        recording = [worker for worker in asked if worker.diagnostics.dumps()[0]]
        for worker in recording:
            with contextlib.suppress(OSError):  # the counter of an eventfd that is not read is full
                os.eventfd_write(worker.diagnostics.requests, 1)
        _wait_until_written(lambda: [worker.diagnostics.dumps()[1] for worker in recording])
        return [self._snapshot(worker, *before[worker.rank]) for worker in running]

    def _snapshot(self, worker: WorkerProcess, record: HeartbeatRecord, process: str) -> RankSnapshot:
        stacks, flight = worker.diagnostics.dumps()
        collective = record.collective or ("" if worker.sends_an_ending else collective_of(stacks))
        return RankSnapshot(
            worker.rank, self._node_rank, record.step, record.phase,
            collective or unfinished_collective(flight), record.collectives,
            quiet=round(self._quiet(worker), 1), stopped=process in _STOPPED, answered=bool(stacks),
            where=running_frame(stacks) if worker.has_returned else training_frame(stacks),
        )  # fmt: skip

    def _quiet(self, worker: WorkerProcess) -> float:
        pause = self._pauses.get(worker.rank)
        return pause.beats.seconds if pause else 0.0


def _wait_until_written(dumps: Callable[[], Sequence[str]]) -> None:
    """Return when all have begun to write, and have written nothing since the look before, or after a time limit."""
    end, sizes = time.monotonic() + _DUMPING, [0]
    while time.monotonic() < end:
        found = dumps()
        if all(found) and sizes == list(map(len, found)):
            return
        sizes = list(map(len, found))
        time.sleep(0.05)


def request_stacks(worker: WorkerProcess) -> bool:
    """Ask the rank for its stacks; False if it cannot take the request.

    Without a handler the signal would end the rank: an executable, or a rank that begins.
    """
    worker.diagnostics.clear_dumps()  # of an earlier alarm
    pid = _trains(worker, worker.diagnostics.last_heartbeat())
    if not proc.catches(pid, DUMP_SIGNAL):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
    return True


def _trains(worker: WorkerProcess, record: HeartbeatRecord) -> int:
    """Return the process whose steps are the rank's: a process that the script has started, or the rank's own."""
    is_left = record.process != worker.pid and proc.catches(record.process, DUMP_SIGNAL)
    return record.process if is_left else worker.pid
