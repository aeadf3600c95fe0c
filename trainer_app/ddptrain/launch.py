"""The node's launcher: import torch once, start the node's ranks, watch them, and say how the node ended.

Its last act is the termination message: the root cause, not the first peer that noticed. ``children`` starts a rank,
``supervise`` watches, ``relay`` prints what the ranks say, ``node`` judges.
"""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from ddptrain import children, termination
from ddptrain.bounded import within
from ddptrain.cgroup import oom_kills
from ddptrain.checkpoint import newest_place
from ddptrain.config import Config
from ddptrain.cpus import calm_torch
from ddptrain.errors import Stopped, UsageError
from ddptrain.files import make_directory
from ddptrain.network import free_port
from ddptrain.node import Node, root_cause
from ddptrain.postmortem import Postmortem, blame
from ddptrain.ranks import Ranks
from ddptrain.relay import own_printer, rank_printer
from ddptrain.stop import STOPPING, StopFlag, heeded
from ddptrain.supervise import Supervisor
from ddptrain.termination import Report
from ddptrain.watchdog import Watchdog

_NOT_AGAIN = (0, 2, 71, 75, 78, 79, 80)  # codes that a second life would end with as well, or that are no failure
_VOLUME = 5.0  # seconds for the volume to tell what it holds


@dataclass(frozen=True)
class Options:
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


def launch(config: Config, ranks: Ranks, stop: StopFlag, options: Options) -> Report:
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
    if stop.requested or STOPPING & set(signals[1]):
        raise Stopped("stopped by a signal in phase start", saved=False)
    postmortem = Postmortem.at(config, ranks, options.log_dir)
    if postmortem:
        postmortem.clear()
    for life in range(options.max_restarts + 1):
        if life:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life)
            ranks = with_port(ranks, "fixed" if options.fixed_port else None)
        report, node = _live(config, ranks, options, signals, postmortem)
        if report["code"] in _NOT_AGAIN or node.stop_signal is not None or life == options.max_restarts:
            break
        own_printer(config.log_format)(f"restart {life + 1} of {options.max_restarts}: {report['message']}")
    termination.write(report, termination.destination())
    return report


def _live(
    config: Config, ranks: Ranks, options: Options, signals: tuple[int, list[int]], postmortem: Postmortem | None
) -> tuple[Report, Node]:
    """One life of the node's ranks: its report, and what became of them."""
    node, killed_for_memory = Node(), oom_kills()
    for local_rank in range(ranks.nproc_per_node):
        place = ranks.child(local_rank)
        node.children.append(children.start(config, place, how=options.how, job=options.job, log_dir=options.log_dir))
    watchdog = Watchdog(config.hang_timeout, ranks.node_rank) if config.hang_timeout else None
    supervisor = Supervisor(
        node,
        nnodes=ranks.nnodes,
        wakeup=signals[0],
        pending=signals[1],
        stop_grace=config.stop_grace,
        say=rank_printer(config.log_format),
        tell=own_printer(config.log_format),
        watchdog=watchdog,
        report=postmortem,
    )
    supervisor.run()
    report = root_cause(node)
    if report["code"] and not report.get("checkpoint") and config.checkpoint_dir:
        # Rank 0, which knows, could not tell.
        report["checkpoint"] = within(_VOLUME, lambda: newest_place(Path(config.checkpoint_dir)))
    if report.get("signal") == signal.SIGKILL and oom_kills() > killed_for_memory:
        report["message"] = (
            f"rank {report['rank']} was killed by SIGKILL: the container's memory limit was reached; "
            f"next: raise it, or lower --batch-size or the ranks per node"
        )
    _tell_other_nodes(ranks, node, report)
    if postmortem and report["code"] not in (0, 75, 80):
        if report.get("cause") == "peer" and ranks.nnodes > 1 and (other := postmortem.culprit_elsewhere()):
            report = blame(report, other)
            own_printer(config.log_format)(f"error: {report['message']}")
        postmortem.write(report, supervisor.sightings, [])
    for child in node.children:
        children.close(child)
    return report, node


def _tell_other_nodes(ranks: Ranks, node: Node, report: Report) -> None:
    """Speak for a rank that was killed, and could not say itself that it leaves."""
    if ranks.nnodes > 1 and report.get("cause") == "own" and (report.get("signal") or node.verdict):
        from ddptrain.store import announce_killed

        announce_killed(ranks, int(report["rank"]), str(report["message"]))


def preload() -> None:
    """Import everything a rank will need, and nothing that computes.

    ``torch._dynamo`` alone costs two seconds: the first optimizer that is constructed imports it, with some 900
    modules.
    """
    calm_torch()
    for module in ("torch._dynamo", "ddptrain.entry", "ddptrain.ddp"):
        importlib.import_module(module)


def with_port(ranks: Ranks, env_port: str | None) -> Ranks:
    """A node that trains alone needs no agreed port: any free one keeps two jobs on one machine apart."""
    if ranks.nnodes > 1 or env_port:
        return ranks
    return replace(ranks, master_port=free_port())


def _check(ranks: Ranks, options: Options) -> None:
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
    for number in (*heeded(), signal.SIGCHLD):
        signal.signal(number, lambda n, _frame: pending.append(n))
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    return wakeup, pending
