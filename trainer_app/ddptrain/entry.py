"""Where a rank's life begins, once torch may be imported: in this very process, or in a child of the launcher.

``cli`` calls ``run_here`` (alone, under torchrun, or by hand), ``children`` calls ``run_forked``; both say where the
report goes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddptrain import termination
from ddptrain.children import Assignment
from ddptrain.config import Config
from ddptrain.console import Console
from ddptrain.finite import dumps
from ddptrain.ranks import Ranks
from ddptrain.stop import STOPPING, StopFlag
from ddptrain.worker import Worker

if TYPE_CHECKING:
    from ddptrain.infer import Wanted


def run_here(
    config: Config,
    ranks: Ranks,
    console: Console,
    stop: StopFlag,
    *,
    job: str = "train",
    wanted: Wanted | None = None,
    tell: Callable[[termination.Report], None] = lambda report: None,
) -> int:
    """Do the job in this process, with no launcher above: alone, under torchrun, or by hand. Returns the exit code.

    Args:
        job, wanted: see Worker.
        tell: also takes the report.
    """

    def deliver(report: termination.Report) -> None:
        termination.write(report, termination.destination(), shared=ranks.world_size > 1)
        tell(report)

    code = Worker(config, ranks, console, stop, job=job, wanted=wanted).run(deliver)
    if code and ranks.world_size > 1:
        # The group was left in the middle of something: its destructor could wait for peers that never come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run_forked(assignment: Assignment, console: Console) -> int:
    """Do the job in a child of the launcher, which reads the report from a pipe. Returns the exit code."""

    def deliver(report: termination.Report) -> None:
        with os.fdopen(assignment.reports, "wb") as pipe:
            pipe.write(dumps(report).encode())

    stop = StopFlag()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # blocked until now by the launcher
    worker = Worker(assignment.config, assignment.ranks, console, stop, job=assignment.job, box=assignment.box)
    return worker.run(deliver)
