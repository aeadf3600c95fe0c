"""How a rank's process comes to be: forked from the launcher, which has torch imported already, or started afresh.

A fork takes milliseconds, a fresh interpreter with torch seconds. The parent must stay forkable: it runs no tensor
operation, starts no thread and never asks for CUDA, because a child inherits locks and half-initialised runtimes, but
not the threads that would release them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from ddptrain.blackbox import BlackBox
from ddptrain.config import Config
from ddptrain.console import Console, terminal_of
from ddptrain.errors import UsageError
from ddptrain.node import Child
from ddptrain.ranks import Ranks
from ddptrain.stop import STOPPING
from ddptrain.streams import forgive

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Assignment:
    """What a rank's process is told: its job (train or preflight), and where its report and breadcrumbs go."""

    config: Config
    ranks: Ranks
    job: str
    reports: int
    box: BlackBox


def start(config: Config, ranks: Ranks, *, how: str, job: str, log_dir: str) -> Child:
    """Start one rank, by ``how``: prefork or spawn. Its output and its report come back through pipes.

    Args:
        log_dir: also keep its output in ``rank-N.log`` there; empty for nowhere.
    Raises:
        UsageError: that file cannot be written.
    """
    log = _log(Path(log_dir) / f"rank-{ranks.rank}.log") if log_dir else None
    output_read, output_write = os.pipe()
    report_read, report_write = os.pipe()
    box = BlackBox.create(ranks.rank)
    begin = _fork if how == "prefork" else _spawn
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the child has a handler of its own, a signal passed on to it would be lost, or end it without a word.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        pid, process = begin(Assignment(config, ranks, job, report_write, box), output_write)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.close(output_write)
    os.close(report_write)
    for descriptor in (output_read, report_read):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
    return Child(ranks.rank, pid, output_read, report_read, log, box, process)


def _log(path: Path) -> BinaryIO:
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise UsageError(
            f"--log-dir: {path} cannot be written: {error.strerror}", next_step="name another directory"
        ) from error


def close(child: Child) -> None:
    """Release what an ended child held."""
    for descriptor in (child.output, child.reports):
        os.close(descriptor)
    if child.log:
        child.log.close()
    if child.box:
        child.box.close()


def _fork(assignment: Assignment, output: int) -> tuple[int, subprocess.Popen[bytes] | None]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(assignment, parent, output)
    return pid, None


def _spawn(assignment: Assignment, output: int) -> tuple[int, subprocess.Popen[bytes] | None]:
    told = json.dumps({**asdict(assignment), "parent": os.getpid()})
    process = subprocess.Popen(
        [sys.executable, "-c", "from ddptrain.children import spawned; spawned()", told], stdout=output, stderr=output,
        pass_fds=(assignment.reports, *assignment.box.descriptors),
    )  # fmt: skip
    return process.pid, process


def spawned() -> NoReturn:
    """What a fresh interpreter runs: become the rank that its argument describes."""
    told = json.loads(sys.argv[1])
    forgive()
    config, ranks, box = Config(**told["config"]), Ranks(**told["ranks"]), BlackBox(**told["box"])
    _become_rank(Assignment(config, ranks, told["job"], told["reports"], box), told["parent"], 1)


def die_with(parent: int) -> None:
    """In a child: be killed as soon as ``parent`` ends, also if it ended before this line."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _become_rank(assignment: Assignment, parent: int, output: int) -> NoReturn:
    """In the child: shed the launcher, do the job, leave without running the parent's exit handlers."""
    code, ranks = 1, assignment.ranks
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A group of its own: Ctrl-C at a terminal reaches the launcher alone, which passes it on once.
        os.setpgid(0, 0)
        die_with(parent)
        terminal = terminal_of()
        if terminal is not None:
            terminal = os.fdopen(os.dup(terminal.fileno()), "w")
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {
            "RANK": str(ranks.rank),
            "LOCAL_RANK": str(ranks.local_rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_WORLD_SIZE": str(ranks.nproc_per_node),
            "MASTER_ADDR": ranks.master_addr,
            "MASTER_PORT": str(ranks.master_port),
        }
        from ddptrain.entry import run_forked

        code = run_forked(assignment, Console(ranks.rank, terminal))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
