"""The node's launcher: import torch once, start the node's ranks, watch them, and say how the node ended.

Its last act is the termination message: the root cause, not the first peer that noticed. ``children`` starts a rank,
``supervise`` watches, ``relay`` prints what the ranks say, ``node`` judges.

The launcher's loop over its living ranks: output and signals are passed on, ends collected, hangs noticed.

``launch`` starts the ranks and calls ``supervise``; it returns when all have ended.

``--how torchrun``: the same ranks started by PyTorch's own launcher instead of ours, to compare the two.

``cli`` asks for the command and becomes it. Where torchrun was started by somebody else, ``ranks`` reads what it set.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddptrain import exit_codes
from ddptrain.checkpoint import newest_place
from ddptrain.config import Config
from ddptrain.distributed.topology import Ranks, free_port
from ddptrain.errors import Stopped, UsageError
from ddptrain.files import make_directory
from ddptrain.launcher import failure_report as postmortem
from ddptrain.launcher import processes as children
from ddptrain.launcher.failure_report import FailureReports, with_root_cause
from ddptrain.launcher.hang_detector import RankState, Watchdog, hang_report
from ddptrain.launcher.processes import (
    WorkerGroup,
    WorkerProcess,
    launcher_printer,
    rank_printer,
    report_of,
    root_cause,
    run_with_timeout,
)
from ddptrain.reporting import termination
from ddptrain.reporting.termination import Report
from ddptrain.resources import oom_kills, set_torch_defaults
from ddptrain.signals import STOP_SIGNALS, StopFlag, stop_signals

# Codes that a second life would end with as well, or that are no failure.
_NOT_AGAIN = (
    0,
    exit_codes.USAGE,
    exit_codes.RANKS,
    exit_codes.STOPPED,
    exit_codes.MISMATCH,
    exit_codes.NOT_FINITE,
    exit_codes.SUPERSEDED,
)
_VOLUME = 5.0  # seconds for the volume to tell what it holds


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch, beside what to train.

    Attributes:
        how: prefork, or spawn (a fresh interpreter per rank).
        job: what each rank does: train or preflight.
        log_dir: also keep each rank's output in ``rank-N.log`` there.
        max_restarts: lives after the first; only a node that trains alone may have them.
        fixed_port: the user chose the port, so that a new life must not choose another.
    """

    how: str = "prefork"
    job: str = "train"
    log_dir: str = ""
    max_restarts: int = 0
    fixed_port: bool = False


def launch(config: Config, ranks: Ranks, stop: StopFlag, options: LaunchOptions) -> Report:
    """Start this node's ranks and wait for them. Returns the node's report: that of the root cause.

    Args:
        ranks: the node's place.
        stop: signals that came until now.
    Raises:
        Stopped: a signal came before the first rank was started.
        UsageError: the log directory cannot be made, or restarts were asked for on one of several nodes.
    """
    _check(ranks, options)
    signals = _catch_signals()
    if options.how == "prefork":
        preload()
    if stop.requested or STOP_SIGNALS & set(signals[1]):
        raise Stopped("stopped by a signal in phase start", saved=False)
    postmortem = FailureReports.at(config, ranks, options.log_dir)
    if postmortem:
        postmortem.clear()
    for life in range(options.max_restarts + 1):
        if life:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life)
            ranks = with_free_port(ranks, "fixed" if options.fixed_port else None)
        report, node = _live(config, ranks, options, signals, postmortem)
        if report["code"] in _NOT_AGAIN or node.stop_signal is not None or life == options.max_restarts:
            break
        launcher_printer(config.log_format)(f"restart {life + 1} of {options.max_restarts}: {report['message']}")
    termination.write(report, termination.destination())
    return report


def _live(
    config: Config,
    ranks: Ranks,
    options: LaunchOptions,
    signals: tuple[int, list[int]],
    postmortem: FailureReports | None,
) -> tuple[Report, WorkerGroup]:
    """One life of the node's ranks: its report, and what became of them."""
    node, killed_for_memory = WorkerGroup(), oom_kills()
    for local_rank in range(ranks.nproc_per_node):
        place = ranks.of_local_rank(local_rank)
        node.children.append(children.start(config, place, how=options.how, job=options.job, log_dir=options.log_dir))
    watchdog = Watchdog(config.hang_timeout, ranks.node_rank) if config.hang_timeout else None
    supervisor = Supervisor(
        node,
        nnodes=ranks.nnodes,
        wakeup=signals[0],
        pending=signals[1],
        stop_grace=config.stop_grace,
        say=rank_printer(config.log_format),
        tell=launcher_printer(config.log_format),
        watchdog=watchdog,
        report=postmortem,
    )
    supervisor.run()
    report = root_cause(node)
    if report["code"] and not report.get("checkpoint") and config.checkpoint_dir:
        # Rank 0, which knows, could not tell.
        report["checkpoint"] = run_with_timeout(_VOLUME, lambda: newest_place(Path(config.checkpoint_dir)))
    if report.get("signal") == signal.SIGKILL and oom_kills() > killed_for_memory:
        report |= {
            "message": f"rank {report['rank']} was killed by SIGKILL: the container's memory limit was reached",
            "hint": None,
            "next": "raise the memory limit, or lower --batch-size or the ranks per node",
        }
    _tell_other_nodes(ranks, node, report)
    if postmortem and report["code"] not in (0, exit_codes.STOPPED, exit_codes.SUPERSEDED):
        if report.get("cause") == "peer" and ranks.nnodes > 1 and (other := postmortem.culprit_elsewhere()):
            report = with_root_cause(report, other)
            launcher_printer(config.log_format)(f"error: {report['message']}")
        postmortem.write(report, supervisor.rank_states, [])
    for child in node.children:
        children.close(child)
    return report, node


def _tell_other_nodes(ranks: Ranks, node: WorkerGroup, report: Report) -> None:
    """Speak for a rank that was killed, and could not say itself that it leaves."""
    if ranks.nnodes > 1 and report.get("cause") == "own" and (report.get("signal") or node.verdict):
        from ddptrain.distributed.rendezvous import announce_killed

        announce_killed(ranks, int(report["rank"]), str(report["message"]))


def preload() -> None:
    """Import everything a rank will need, and nothing that computes.

    ``torch._dynamo`` alone costs two seconds: the first optimizer that is constructed imports it, with some 900
    modules.
    """
    set_torch_defaults()
    for module in ("torch._dynamo", "ddptrain.worker", "ddptrain.training.gradient_sync"):
        importlib.import_module(module)


def with_free_port(ranks: Ranks, env_port: str | None) -> Ranks:
    """A node that trains alone needs no agreed port: any free one keeps two jobs on one machine apart."""
    if ranks.nnodes > 1 or env_port:
        return ranks
    return replace(ranks, master_port=free_port())


def _check(ranks: Ranks, options: LaunchOptions) -> None:
    if options.max_restarts and ranks.nnodes > 1:
        raise UsageError(
            f"--max-restarts {options.max_restarts} on one of {ranks.nnodes} nodes",
            hint="all nodes must begin their new life together, which only whoever started them can see to",
            next_step="leave it out, and let the operator restart the group",
        )
    if options.log_dir:
        make_directory("--log-dir", options.log_dir)


def _catch_signals() -> tuple[int, list[int]]:
    """(read end of a pipe that wakes us, the list that collects the signals' numbers)."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_write, False)
    pending: list[int] = []
    for number in (*stop_signals(), signal.SIGCHLD):
        signal.signal(number, lambda n, _frame: pending.append(n))
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    return wakeup, pending


_PEER_GRACE = 2.0  # seconds for the other ranks to end by themselves after one failed
_OTHER_NODE = 5.0  # seconds for the node with the find_hung_rank to end it, and thereby our collectives


class Supervisor:
    """Watches the children of one node.

    Args:
        pending: numbers of signals that came, appended by the handlers.
        wakeup: read end of the pipe that the signals' arrival makes readable.
        say: takes one line of a rank's output.
        tell: takes one line of the launcher's own.
        watchdog: None where hangs are nobody's business.
        report: where a failure is written down as soon as it is known.
    """

    def __init__(
        self,
        node: WorkerGroup,
        *,
        nnodes: int,
        wakeup: int,
        pending: list[int],
        stop_grace: float,
        say: Callable[[WorkerProcess, bytes], None],
        tell: Callable[[str], None],
        watchdog: Watchdog | None,
        report: postmortem.FailureReports | None,
    ) -> None:
        self._node, self._nnodes, self._wakeup, self._pending = node, nnodes, wakeup, pending
        self._stop_grace, self._say, self._tell = stop_grace, say, tell
        self._watchdog, self._postmortem = watchdog, report
        self.rank_states: list[RankState] = []

    def run(self) -> None:
        """Returns when all ranks have ended."""
        node = self._node
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, None)
            for child in node.children:
                selector.register(child.output, selectors.EVENT_READ, child)
                selector.register(child.reports, selectors.EVENT_READ, child)
            while any(child.status is None for child in node.children):
                for key, _ in selector.select(self._timeout()):
                    if key.data is None:
                        os.read(self._wakeup, 4096)
                    elif not self._read(key.data, key.fd):
                        selector.unregister(key.fd)
                self._pass_on_signals()
                self._reap()
                self._look_for_a_hang()
                if node.deadline is not None and time.monotonic() >= node.deadline:
                    self._kill()
        for child in node.children:
            for descriptor in (child.output, child.reports):
                while self._read(child, descriptor, last=True):
                    pass

    def _timeout(self) -> float | None:
        waits = [] if self._node.deadline is None else [max(0.0, self._node.deadline - time.monotonic())]
        if self._watching:
            assert self._watchdog is not None
            waits.append(self._watchdog.interval)
        return min(waits, default=None)

    @property
    def _watching(self) -> bool:
        """Ranks that were told to stop, or whose peer has failed, have a deadline; killed ones have an explanation."""
        explained = self._node.verdict is not None or any(child.killed_by_us for child in self._node.children)
        return self._watchdog is not None and self._node.deadline is None and not explained

    def _read(self, child: WorkerProcess, descriptor: int, *, last: bool = False) -> bool:
        """Take what the pipe holds; False at its end (with ``last``, also when it is empty)."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            data = b""
            if not last:
                return True
        if descriptor == child.reports:
            child.report += data
            return bool(data)
        *lines, child.unfinished = (child.unfinished + data).split(b"\n")
        if not data and child.unfinished:
            lines, child.unfinished = [*lines, child.unfinished], b""
        for line in lines:
            child.tail.append(line)
            self._say(child, line)
        sys.stdout.buffer.flush()
        return bool(data)

    def _pass_on_signals(self) -> None:
        node = self._node
        while self._pending:
            number = self._pending.pop(0)
            if number == signal.SIGCHLD:
                continue
            if node.stop_signal is None:
                node.stop_signal = number
                self._end_within(self._stop_grace)
            for child in node.children:
                if child.status is None:
                    os.kill(child.pid, number)

    def _reap(self) -> None:
        """Collect ended children; as PID 1 of a container also strangers, whose parents are gone."""
        by_pid = {child.pid: child for child in self._node.children}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid:
                child = by_pid[pid]
                child.status, child.ended = status, time.monotonic()
                if child.process is not None:
                    child.process.returncode = os.waitstatus_to_exitcode(status)
                if status != 0:
                    self._tell_early(child)
                    self._end_within(_PEER_GRACE)

    def _tell_early(self, child: WorkerProcess) -> None:
        """The first failure of its own is written down before the ranks elsewhere wonder who is gone."""
        if self._postmortem is None or self._node.verdict or child.killed_by_us or self._nnodes == 1:
            return
        while self._read(child, child.reports, last=True):
            pass
        report = report_of(child)
        if (
            report.get("cause") == "own"
            and report.get("outcome") == "failed"
            and report["code"] != exit_codes.SUPERSEDED
        ):
            self._postmortem.write(report, self.rank_states, [])

    def _look_for_a_hang(self) -> None:
        node, watchdog = self._node, self._watchdog
        if not self._watching or watchdog is None or not watchdog.stalled(node.children):
            return
        self.rank_states = watchdog.examine(node.children)
        if not self.rank_states:
            return
        node.verdict = hang_report(self.rank_states, timeout=watchdog.timeout, all_ranks=self._nnodes == 1)
        self._tell(f"error: {node.verdict['message']}")
        if self._postmortem:
            self._postmortem.write(node.verdict, self.rank_states, node.children)
        if node.verdict["cause"] == "own":
            self._kill()
        else:
            self._end_within(_OTHER_NODE)

    def _end_within(self, seconds: float) -> None:
        self._node.deadline = min(self._node.deadline or float("inf"), time.monotonic() + seconds)

    def _kill(self) -> None:
        for child in self._node.children:
            if child.status is None and not child.killed_by_us:
                child.killed_by_us = True
                os.kill(child.pid, signal.SIGKILL)
        self._node.deadline = None


def command(ranks: Ranks, arguments: Mapping[str, Any], options: LaunchOptions) -> list[str]:
    """The command that starts the ranks of this node; torchrun has no watchdog and no report of ours.

    Args:
        ranks: the node's place.
        arguments: settings by their names; None means not given.
    Raises:
        UsageError: something was asked for that only our own launcher does.
    """
    if options.max_restarts or options.log_dir:
        raise UsageError(
            "--how torchrun knows neither --max-restarts nor --log-dir",
            hint="these are of our own launcher",
            next_step="leave them out, or use --how spawn",
        )
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks.nnodes}", f"--node-rank={ranks.node_rank}",
        f"--nproc-per-node={ranks.nproc_per_node}", f"--master-addr={ranks.master_addr}",
        f"--master-port={ranks.master_port}", "--max-restarts=0", "-m", "ddptrain", "train", *_spelled(arguments),
    ]  # fmt: skip


def _spelled(arguments: Mapping[str, Any]) -> list[str]:
    """The flags that say what ``arguments`` hold."""
    flags = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
    switches = [f"--{name}" if value else f"--no-{name}" for name, value in flags.items() if isinstance(value, bool)]
    return switches + [f"--{name}={value}" for name, value in flags.items() if not isinstance(value, bool)]
