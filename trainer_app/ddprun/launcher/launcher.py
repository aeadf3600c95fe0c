"""The launcher of one node: import the program once, start its ranks and start them again, report how the node ended.

The termination message names the root cause, not the first peer that noticed.
"""

import os
from dataclasses import replace

from ddprun.distributed.topology import Ranks, free_port
from ddprun.errors import Stopped, UsageError
from ddprun.files import make_directory, open_descriptors
from ddprun.launcher.agreement import granted
from ddprun.launcher.node_reports import NodeReports
from ddprun.launcher.peers import take_token
from ddprun.launcher.processes import launcher_line
from ddprun.launcher.services import Services
from ddprun.launcher.supervisor import LaunchOptions, Supervisor
from ddprun.reporting import termination
from ddprun.reporting.termination import Report
from ddprun.settings import Settings
from ddprun.signals import STOP_SIGNALS, SignalQueue, StopFlag


def launch(settings: Settings, ranks: Ranks, stop: StopFlag, options: LaunchOptions) -> Report:
    """Start this node's ranks, wait for them, and return how the node ended: the report is that of the root cause.

    Args:
        ranks: the node's place.
        stop: has a signal come before this call?
    Raises:
        Stopped: a signal came before the first rank was started.
        UsageError: the log directory cannot be made, or restarts were requested on one of several nodes.
    """
    if options.max_restarts and ranks.nnodes > 1:
        raise UsageError(
            f"--max-restarts {options.max_restarts} on one of {ranks.nnodes} nodes",
            hint="all nodes must restart together, and the launcher of one node cannot restart the others",
            next_step="leave it out, and let the operator restart the group",
        )
    if options.log_dir:
        make_directory("--log-dir", options.log_dir)
    token, signals, before = take_token(os.environ), SignalQueue(), open_descriptors()
    if options.start == "auto" and (reason := options.program.preload()):
        launcher_line(f"each rank starts in an interpreter of its own: {reason}")
        options = replace(options, start="spawn")
    options = replace(options, opened=open_descriptors() - before)
    if stop.requested or STOP_SIGNALS & set(signals.pending):
        raise Stopped("stopped by a signal in phase start", saved=False)
    grant = options.max_restarts or granted()
    services = Services.started(ranks, options.program, grant, token)
    placed, number = replace(ranks, master_port=ranks.master_port or free_port()), 1
    while True:
        reports = NodeReports.of_life(settings.checkpoint_dir, ranks, options.log_dir, number)
        if reports and number == 1:
            reports.clear()
        services.begin(number)
        supervisor = Supervisor(settings, placed, options, signals, reports, services, life=number)
        report = supervisor.run()
        if (order := services.agreement.next_life) is None:
            break
        supervisor.finish_logs()
        placed, number = replace(ranks, master_port=order.port), order.life
        why = f"node {order.blamed.node}: {order.blamed.failure.message}" if order.blamed else "a peer was lost"
        launcher_line(f"restart in place {number - 1} of {grant}: {why}")
    termination.write(report | services.agreement.reports(), termination.destination())
    if report["code"]:
        for line in termination.root_cause_lines(report):
            launcher_line(line)
    supervisor.finish_logs()
    return report
