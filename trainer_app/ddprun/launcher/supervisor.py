"""The supervisor of one life of a node's ranks: it starts them, follows them, ends them, and reports how they ended."""

import errno
import os
import selectors
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from ddprun import exit_codes, proc
from ddprun.checkpoint_files import newest_place
from ddprun.distributed.topology import Ranks
from ddprun.errors import PeerLost, RanksError, Stopped, TrainerError
from ddprun.launcher import hang_detector, processes
from ddprun.launcher.divergence import DivergenceWatch
from ddprun.launcher.hang_detector import Deadlines, HangDetector, RankSnapshot, hang_report
from ddprun.launcher.life_messages import End, RanksFailure
from ddprun.launcher.log_files import LogFiles
from ddprun.launcher.node_reports import NodeReports, with_root_cause, without_report
from ddprun.launcher.orphans import Orphans
from ddprun.launcher.processes import WorkerProcess, launcher_line, rank_line
from ddprun.launcher.services import Services
from ddprun.launcher.stalls import StallWatch
from ddprun.program import Program
from ddprun.reporting import termination
from ddprun.reporting.console import continue_output
from ddprun.reporting.termination import Report
from ddprun.resources import oom_kills
from ddprun.settings import Settings
from ddprun.signals import STOP_SIGNALS, SignalQueue

_READ_SIZE = 65536
_VOLUME = 5.0  # seconds to read the newest checkpoint's name from the volume
_ANNOUNCE = 15.0  # seconds to announce a killed rank; with --start spawn, torch is imported first
_OUTPUT_INTERVAL = 0.1  # seconds between attempts to write output that has not been read yet
_SOON = 0.05  # seconds between looks at what the ranks left behind, or for the answers of the other nodes
_PEER_GRACE = 2.0  # seconds for the other ranks to end by themselves after one failed
_OTHER_NODE = 5.0  # seconds for the node of the hung rank to end it, and with it the collectives of this node


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch the ranks.

    Attributes:
        program: what each rank runs.
        start: auto, which forks the ranks if that is safe, or spawn (an interpreter for each).
        log_dir: also write each rank's output to ``rank-N.log`` there, after restarts to ``rank-N.life-M.log``.
        max_restarts: how often the ranks are restarted in place, whatever is granted; only on a node that trains alone.
        opened: descriptors that were opened by the imports before the fork; the ranks keep them.
    """

    program: Program
    start: str = "auto"
    log_dir: str = ""
    max_restarts: int = 0
    opened: Collection[int] = ()


@dataclass
class Supervisor:
    """Starts the ranks of one node and supervises them until all have ended: output, signals, exits and hangs.

    Attributes:
        life: the number of starts of the ranks in this run.
    """

    settings: Settings
    ranks: Ranks
    options: LaunchOptions
    signals: SignalQueue
    reports: NodeReports | None
    services: Services
    life: int = 1

    def __post_init__(self) -> None:
        settings, services = self.settings, self.services
        self._deadlines = Deadlines.of(os.environ, self.life, self.ranks.nnodes)
        self._detector = HangDetector(
            settings.hang_timeout, self.ranks.node_rank, settings.stall_report, self._deadlines
        )
        self._watch = StallWatch(
            self._detector, services.peers, services.progress, self.reports, services.look,
            nodes=self.ranks.nnodes, is_told_to_stop=self._is_stopping,
        )  # fmt: skip
        self._replicas = DivergenceWatch(settings, services.table, services.progress, services.peers, life=self.life)
        self._agreed = services.agreement
        self._hangs = False  # a rank of this node hangs, and all nodes are asked for their stacks
        self._orphans = Orphans()
        self._workers: list[WorkerProcess] = []
        self._logs: LogFiles | None = None
        self._states: list[RankSnapshot] = []  # of the ranks, when a hang was detected
        self._decided: Report | None = None  # why this launcher ends the ranks: a hang, or replicas that diverged
        self.stop_signal: int | None = None
        self._ended_before_stop = False
        self._oom_kills = oom_kills()  # in this container, before the ranks start
        self._deadline: float | None = None  # when the ranks that still run are killed, by time.monotonic

    def run(self) -> Report:
        """Run the ranks once and return how the node ended."""
        for local_rank in range(self.ranks.nproc_per_node):
            ranks = self.ranks.of_local_rank(local_rank)
            self._workers.append(self._start(ranks))
        self.services.table.follow(self._workers)
        self.services.look.follow(self._workers)
        if self.ranks.node_rank == 0:
            self.services.progress.follow(self._workers[0].diagnostics)
        with selectors.DefaultSelector() as selector:
            selector.register(self.signals.wakeup, selectors.EVENT_READ, None)
            selector.register(self.services.peers, selectors.EVENT_READ, self.services.peers)
            for port in filter(None, (self.services.port, self.services.trainer_port)):
                selector.register(port, selectors.EVENT_READ, port)
            self._supervise(selector)
            self._await_next_life(selector)
        report = self._own_report() if self._agreed.next_life else self._final_report()
        if report.get("progress"):
            report["progress"] = self.services.progress.completed(report["progress"])
        if report["code"] and processes.is_fenced(self._workers):
            report["fenced"] = True
        if report["code"] == 0 or self._agreed.next_life:
            self._watch.withdraw()
        self.services.progress.keep()
        self.services.table.follow(())
        self.services.look.follow(())
        for worker in self._workers:
            worker.close()
        return report

    def _start(self, ranks: Ranks) -> WorkerProcess:
        """Start one rank.

        Raises:
            UsageError: the files of ``--log-dir`` cannot be written, in the first life.
            RanksError: this process has no descriptor left for it; no rank stays.
            OSError: there is no memory or no process left, which may pass; no rank stays.
        """
        options = self.options
        try:
            if options.log_dir and self._logs is None:
                self._logs = LogFiles.of_life(options.log_dir, self.ranks.local_ranks, self.life)
            log = self._logs.streams[ranks.rank - self.ranks.local_ranks[0]] if self._logs else None
            return processes.start(
                options.program, ranks, spawns=options.start == "spawn", opened=options.opened, log=log
            )
        except OSError as error:
            self._kill()
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
                worker.close()  # their descriptors are needed to write the report
            if error.errno != errno.EMFILE:  # not final, because other programs of the machine may be the reason
                raise OSError(error.errno, f"rank {ranks.rank} cannot be started: {error.strerror}") from error
            raise RanksError(
                f"rank {ranks.rank} cannot be started: {error.strerror}",
                hint="the limit of open files (`ulimit -n`) is too low",
                next_step=f"raise it; {self.ranks.nproc_per_node} rank(s) need about 100 open files each",
            ) from error

    def finish_logs(self) -> None:
        """Wait for the volume of ``--log-dir`` to take the last lines, for a limited time."""
        if self._logs:
            logs, self._logs = self._logs, None
            logs.close()

    def _is_stopping(self) -> bool:
        """Return whether a stop signal has come, also one that was not passed on yet."""
        return self.stop_signal is not None or bool(STOP_SIGNALS & set(self.signals.pending))

    def _supervise(self, selector: selectors.BaseSelector) -> None:
        """Return when all ranks have ended, and what they left behind, and their output is printed."""
        for worker in self._workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
            selector.register(worker.reports, selectors.EVENT_READ, worker)
        while self._are_ranks_left() or self._orphans.remain(self._deadline if self.stop_signal else None):
            self._handle(selector, self._longest_wait())
            self._pass_on_signals()
            self._reap()
            self._check_for_hang()
            self._check_returned()
            self.services.table.turn()
            self._check_replicas()
            self.services.look.turn()
            self._agree()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
        for worker in self._workers:
            for descriptor in (worker.output, worker.reports):
                while self._read(worker, descriptor, last=True):
                    pass
        self._orphans.remove_shared_memory()
        if any(processes.report_of(worker)["code"] for worker in self._workers):
            self._replicas.finish()

    def _agree(self) -> None:
        """Hear what the launchers of the group agree on, and end the ranks if it is their end."""
        if self._agreed.turn():
            self._kill()

    def _await_next_life(self, selector: selectors.BaseSelector) -> None:
        """After the end of this node's ranks, wait until the launchers have agreed on what follows."""
        agreed = self._agreed
        if agreed.is_over:
            return
        if (report := self._own_report())["code"]:
            agreed.failed(report)
        else:
            agreed.succeeded()
        while not (agreed.is_over or agreed.next_life):
            self.services.peers.handle()
            self._agree()
            if agreed.next_life is None:  # else a signal that has come since is for the ranks of the next life
                self._pass_on_signals()
            if agreed.must_end:
                agreed.ended(healthy=self._is_healthy, failure=self._failure())
            elif not (agreed.is_over or agreed.next_life):
                self._handle(selector, agreed.longest_wait)
        agreed.obey()  # no rank is left to be killed

    @property
    def _is_healthy(self) -> bool:
        """Whether ranks can be started on this node again; the operator finds another one for a suspect."""
        has_operator = bool(os.environ.get("DDPJOB_UID"))
        return self._orphans.is_empty and not (self._replicas.is_suspect and has_operator)

    def _failure(self) -> RanksFailure | None:
        """Return why ranks of this node failed; None if the launcher has only killed them, and none was stalled."""
        if not self._are_forced or self._decided or self._watch.cause(self._workers):
            report = self._own_report()
            return RanksFailure.of_report(report) if report["code"] else None
        return None

    @property
    def _are_forced(self) -> bool:
        failed = [worker for worker in self._workers if processes.report_of(worker)["code"] != 0]
        return bool(failed) and all(worker.killed_by_us and not worker.failed for worker in failed)

    def _own_report(self) -> Report:
        """Return the root cause on this node: also a rank that was stalled until the others gave it up."""
        report = processes.root_cause(self._workers, stop_signal=self.stop_signal, decided=self._decided)
        is_told = self._are_forced and self.stop_signal is None
        waited = report.get("cause") == "peer" or (not self._decided and (report.get("kind") == "Hang" or is_told))
        if waited and (stalled := self._watch.cause(self._workers)):
            report, self._states = stalled, self._watch.states
        return self._with_oom_kill(report)

    def _longest_wait(self) -> float:
        """Return how many seconds may pass until the ranks are looked at again."""
        limit = _SOON if self._watch.is_busy else self._detector.interval
        limit = min(limit, self._agreed.longest_wait)
        if not self._are_ranks_left():
            limit = _SOON
        elif self._deadline is not None:
            limit = min(limit, max(0.0, self._deadline - time.monotonic()))
        is_left = continue_output()  # it is not read at the moment
        if self._logs:
            is_left |= self._logs.drain()
            self._logs.check()
        return min(_OUTPUT_INTERVAL, limit) if is_left else limit

    def _are_ranks_left(self) -> bool:
        return any(worker.status is None for worker in self._workers)

    def _handle(self, selector: selectors.BaseSelector, wait: float) -> None:
        """Handle what comes within ``wait`` seconds: signals, output and reports of ranks, requests of others."""
        for key, _ in selector.select(wait):
            if key.data is None:
                os.read(self.signals.wakeup, 4096)
            elif not isinstance(key.data, WorkerProcess):
                key.data.handle()
            elif not self._read(key.data, key.fd):
                selector.unregister(key.fd)

    @property
    def _is_ending(self) -> bool:
        """Whether the ranks have ended, have a deadline (a signal came or a peer failed) or were killed for a hang."""
        ending = self._deadline is not None or self._decided is not None or any(w.killed_by_us for w in self._workers)
        return ending or not self._are_ranks_left()

    def _read(self, worker: WorkerProcess, descriptor: int, *, last: bool = False) -> bool:
        """Take what the pipe holds and return False at its end (with ``last``, also if the pipe is empty)."""
        try:
            data = os.read(descriptor, _READ_SIZE)
        except BlockingIOError:
            data = b""
            if not last:
                return True
        if descriptor == worker.reports:
            worker.ending += data
            self._note_failure(worker)
            return bool(data)
        lines = worker.take(data, time.monotonic())
        if not data and worker.unfinished:  # the rank has ended within a line
            lines, worker.unfinished = [worker.unfinished], b""
        for line in lines:
            worker.tail.append(line)
            rank_line(worker, line)
        sys.stdout.buffer.flush()
        if worker.log:
            worker.log.flush()
        return bool(data)

    def _note_failure(self, worker: WorkerProcess) -> None:
        """Act on the failure of a script's rank whose threads may keep it without limit: it has the grace of a stop."""
        if worker.failed or worker.sends_an_ending or worker.status is not None:
            return
        report = processes.sent_report(worker)
        if report and report["code"] != 0:
            worker.failed = time.monotonic()
            self._agreed.failed(report)
            if not worker.killed_by_us:
                self._report_early(report)
            self._end_within(self.settings.stop_grace)

    def _pass_on_signals(self) -> None:
        while self.signals.pending:
            number = self.signals.pending.pop(0)
            if number == signal.SIGCHLD:
                continue
            unsent = [w for w in self._workers if not (w.ending or w.returned)]  # their threads have not ended
            if (
                self.stop_signal is None
                and self._have_returned()
                and self._detector.idle_after_return(unsent) >= hang_detector.LINGERING
            ):
                self._note_end_before_stop()
                self._end_returned(number)
                continue
            if self.stop_signal is None:
                self.stop_signal = number
                self._end_within(self.settings.stop_grace)
                self._agreed.told_to_stop()
            for worker in self._workers:
                if worker.status is None:
                    os.kill(worker.pid, number)

    def _have_returned(self) -> bool:
        """Whether the scripts of all ranks have returned without a failure: nothing is left to train."""
        left = [worker for worker in self._workers if worker.status is None]
        ended = all(processes.report_of(worker)["code"] == 0 for worker in self._workers if worker.status is not None)
        return bool(left) and ended and all(worker.has_returned and not worker.failed for worker in left)

    def _end_returned(self, number: int) -> None:
        """End the processes whose scripts have returned: it is no stop of the training, and no failure."""
        self._end_within(self.settings.stop_grace)
        for worker in self._workers:
            if worker.status is None:
                worker.returned = True
                os.kill(worker.pid, number)

    def _note_end_before_stop(self) -> None:
        """Find out whether the scripts had returned before this pod began to be deleted, and not because of it.

        A hook of the pod, or the script itself, may have noticed the deletion before SIGTERM came. That comes within
        the grace of the pod, of which ``stop_grace`` is at least half.
        """
        ends = (worker.diagnostics.last_heartbeat().time for worker in self._workers)
        self._ended_before_stop = time.monotonic() - max(ends) > 2 * self.settings.stop_grace + 1

    def _check_returned(self) -> None:
        """End ranks that do nothing after their scripts, before the operator takes their node for one that hangs."""
        limit = self._deadlines.completion / 2
        if not limit or self._is_ending or not self._have_returned():
            return
        if (idle := self._detector.idle_after_return(self._workers)) >= limit:
            ranks = ", ".join(str(worker.rank) for worker in self._workers if worker.status is None)
            launcher_line(
                f"warning: rank {ranks} ended the script, and its process has done nothing for {idle:.0f} s, half of "
                "completionGraceSeconds: it is ended, and the node has succeeded"
            )
            self._end_returned(signal.SIGTERM)

    def _reap(self) -> None:
        """Collect ended ranks, and orphans."""
        by_pid = {worker.pid: worker for worker in self._workers}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in by_pid:  # not reaped yet: the number is still that of the rank's process group
                processes.end_group(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            self._orphans.collected(pid)
            if worker := by_pid.get(pid):
                worker.status, worker.ended = status, time.monotonic()
                if worker.process is not None:
                    worker.process.returncode = os.waitstatus_to_exitcode(status)
                while self._read(worker, worker.reports, last=True):
                    pass
                report = self._with_oom_kill(processes.report_of(worker))
                if report["code"] != 0:  # exit code 0 without a report is a failure too
                    if not worker.killed_by_us:
                        self._agreed.failed(report)
                        self._report_early(report)
                    if self.stop_signal is None or self.options.program.sends_an_ending:
                        self._end_within(_PEER_GRACE)  # else each rank ends by itself, within the grace

    def _report_early(self, report: Report) -> None:
        """Write down a rank's own failure at once, so that other nodes find it when they miss the rank."""
        if self.reports is None or self._decided or self.ranks.nnodes == 1:
            return
        if self._agreed.has_joined:
            return  # the others hear of it at once, and a report of a life before would be taken for the next one's
        failed = report.get("cause") == "own" and report.get("outcome") == "failed"
        if failed and report["code"] != exit_codes.SUPERSEDED:
            self._write(report, [])

    def _check_for_hang(self) -> None:
        """Report stalls; end the ranks of a node that hangs, after all nodes have taken the stacks of theirs."""
        self._detector.is_last = self.ranks.nnodes == 1 or self._agreed.is_released
        hangs = self._detector.stalled(self._workers)
        self._watch.turn(self._workers, ending=self._is_ending)
        if self._is_ending or self._watch.is_busy:
            return
        if hangs and not self._hangs:
            self._hangs = True
            self._watch.ask()
            return
        was_inspected, self._hangs = self._hangs, False
        if not (hangs and was_inspected):
            return  # the rank has moved: it was slow, or another node has just ended its hung rank
        self._states = self._watch.states
        longest = max(self._detector.timeout, *(int(state.quiet) for state in self._states))
        self._end_for(hang_report(self._states, timeout=longest, all_ranks=self.ranks.nnodes == 1))

    def _check_replicas(self) -> None:
        """End the ranks if they do not have the same parameters, and that is to restart the training."""
        if not self._is_ending and (found := self._replicas.turn()):
            self._end_for(found)

    def _end_for(self, decided: Report) -> None:
        self._decided = decided
        launcher_line(f"error: {decided['message']}")
        if is_own := decided["cause"] == "own":
            self._agreed.failed(decided)  # the other nodes end their ranks while the files are written
        self._write(decided, self._workers)
        if is_own:
            self._kill()
        else:
            self._end_within(_OTHER_NODE)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.status is None and not worker.killed_by_us:
                # The others may hear of the end of a rank before this launcher does, and have it end the other ranks.
                worker.killed_by_us = not proc.is_exiting(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)  # its children follow when it is reaped
        self._deadline = None

    def _write(self, report: Report, workers: list[WorkerProcess]) -> None:
        if self.reports:
            self.reports.write(report, self._states, workers)

    def _report_of_exit(self, told: End) -> Report:
        """Return the report of a node that is to exit: its own failure, or the failure of the node which is blamed."""
        launcher_line(f"no restart in place: {told.reason}")
        failure, blamed = self._failure(), told.blamed
        if failure is not None and (failure.cause == "own" or self.stop_signal is not None):
            report = self._own_report()
        else:
            error: TrainerError = PeerLost(f"the attempt ends on all nodes: {told.reason}")
            if self.stop_signal is not None:
                name = signal.Signals(self.stop_signal).name
                error = Stopped(f"{name} came, and the ranks were killed before they could save", saved=False)
            first = self._workers[0]
            place = {"step": first.diagnostics.last_heartbeat().step}
            report = termination.failure(error, rank=first.rank, progress=place)
        if blamed and blamed.node != self.ranks.node_rank and report.get("cause") == "peer":
            report = with_root_cause(report, {"node": blamed.node, "report": asdict(blamed.failure)})
        report = self._with_checkpoint(report)
        if report["code"] not in (0, exit_codes.STOPPED, exit_codes.SUPERSEDED):
            self._write(report, [])
        return report

    def _final_report(self) -> Report:
        """Return the node's report, completed with what the launcher knows, and pass it on to the other nodes."""
        if self._agreed.exit:
            return self._report_of_exit(self._agreed.exit)
        report = self._with_checkpoint(self._own_report())
        if self._ended_before_stop and not report["code"]:
            report["beforeStop"] = True
        several_nodes, cause = self.ranks.nnodes > 1, report.get("cause")
        unannounced = processes.failed_silently(report, self._workers) or self._decided
        if several_nodes and cause == "own" and unannounced and self.options.program.sends_an_ending:

            def announce() -> None:  # in a child process, because it starts threads and imports torch
                from ddprun.distributed.rendezvous import announce_killed

                announce_killed(self.ranks, int(report["rank"] or 0), str(report["message"]))

            processes.run_with_timeout(_ANNOUNCE, announce)
        if self.reports and report["code"] not in (0, exit_codes.STOPPED, exit_codes.SUPERSEDED):
            lost_peer = several_nodes and cause == "peer"
            # A stop signal ends the wait: the operator then has its verdict, and the next attempt waits for this node.
            if lost_peer:
                self._write(report, [])  # before the wait: other nodes see which one is silent
                if other := self.reports.cause_on_another_node(self._is_stopping):
                    report = with_root_cause(report, other)
                elif silent := self.reports.silent_nodes():
                    report = report | {"message": f"{report['message']}; {without_report(silent)}"}
            self._write(report, [])
        return report

    def _with_checkpoint(self, report: Report) -> Report:
        """Return the report of a failure with the newest checkpoint: rank 0, which knows it, may not have reported."""
        directory = self.settings.checkpoint_dir
        if not report["code"] or report.get("checkpoint") or not directory:
            return report
        return report | {"checkpoint": processes.run_with_timeout(_VOLUME, lambda: newest_place(Path(directory)))}

    def _with_oom_kill(self, report: Report) -> Report:
        """Return the report of a rank that ended by SIGKILL with the reason, if the kernel's counter shows it."""
        if report.get("signal") != signal.SIGKILL or oom_kills() <= self._oom_kills:
            return report
        return termination.oom_killed(report)
