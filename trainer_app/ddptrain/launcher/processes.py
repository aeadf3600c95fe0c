"""How a rank's process comes to be: forked from the launcher, which has torch imported already, or started afresh.

A fork takes milliseconds, a fresh interpreter with torch seconds. The parent must stay forkable: it runs no tensor
operation, starts no thread and never asks for CUDA, because a child inherits locks and half-initialised runtimes, but
not the threads that would release them.

What a launcher prints and keeps: each line of its ranks, told apart by rank, and the lines of its own.

``launch`` chooses the printers by ``--log-format``; ``supervise`` calls them for each line that it read from a pipe.

What the launcher knows of its ranks, and which of their ends explains the node's: the root cause, not its echo.

Peers die milliseconds after the find_hung_rank and often report first, so time alone does not tell.

For the launcher: work on a volume that may never answer, done by another process, for so many seconds at most.

A file system whose server is gone blocks whoever touches it, in the kernel, where no timeout of ours reaches. The
launcher must still kill, pass signals on and report; it may start no thread, but it may fork.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ddptrain import exit_codes
from ddptrain.config import Config
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import UsageError
from ddptrain.heartbeat import Diagnostics
from ddptrain.reporting import termination
from ddptrain.reporting.console import Console, ignore_write_errors, json_line, terminal_or_none
from ddptrain.reporting.termination import Report
from ddptrain.signals import STOP_SIGNALS, die_with_parent


@dataclass(frozen=True)
class Assignment:
    """What a rank's process is told: its job (train or preflight), and where its report and breadcrumbs go."""

    config: Config
    ranks: Ranks
    job: str
    reports: int
    diagnostics: Diagnostics


def start(config: Config, ranks: Ranks, *, how: str, job: str, log_dir: str) -> WorkerProcess:
    """Start one rank, by ``how``: prefork or spawn. Its output and its report come back through pipes.

    Args:
        log_dir: also keep its output in ``rank-N.log`` there; empty for nowhere.
    Raises:
        UsageError: that file cannot be written.
    """
    log = _log(Path(log_dir) / f"rank-{ranks.rank}.log") if log_dir else None
    output_read, output_write = os.pipe()
    report_read, report_write = os.pipe()
    diagnostics = Diagnostics.create(ranks.rank)
    begin = _fork if how == "prefork" else _spawn
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the child has a handler of its own, a signal passed on to it would be lost, or end it without a word.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid, process = begin(Assignment(config, ranks, job, report_write, diagnostics), output_write)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.close(output_write)
    os.close(report_write)
    for descriptor in (output_read, report_read):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
    return WorkerProcess(ranks.rank, pid, output_read, report_read, log, diagnostics, process)


def _log(path: Path) -> BinaryIO:
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise UsageError(
            f"--log-dir: {path} cannot be written: {error.strerror}", next_step="name another directory"
        ) from error


def close(child: WorkerProcess) -> None:
    """Release what an ended child held."""
    for descriptor in (child.output, child.reports):
        os.close(descriptor)
    if child.log:
        child.log.close()
    if child.diagnostics:
        child.diagnostics.close()


def _fork(assignment: Assignment, output: int) -> tuple[int, subprocess.Popen[bytes] | None]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(assignment, parent, output)
    return pid, None


def _spawn(assignment: Assignment, output: int) -> tuple[int, subprocess.Popen[bytes] | None]:
    told = json.dumps({**asdict(assignment), "parent": os.getpid()})
    process = subprocess.Popen(
        [sys.executable, "-c", "from ddptrain.launcher.processes import spawned; spawned()", told],
        stdout=output,
        stderr=output,
        pass_fds=(assignment.reports, *assignment.diagnostics.descriptors),
    )
    return process.pid, process


def spawned() -> NoReturn:
    """What a fresh interpreter runs: become the rank that its argument describes."""
    told = json.loads(sys.argv[1])
    ignore_write_errors()
    config, ranks, diagnostics = Config(**told["config"]), Ranks(**told["ranks"]), Diagnostics(**told["diagnostics"])
    _become_rank(Assignment(config, ranks, told["job"], told["reports"], diagnostics), told["parent"], 1)


def _become_rank(assignment: Assignment, parent: int, output: int) -> NoReturn:
    """In the child: shed the launcher, do the job, leave without running the parent's exit handlers."""
    code, ranks = 1, assignment.ranks
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A group of its own: Ctrl-C at a terminal reaches the launcher alone, which passes it on once.
        os.setpgid(0, 0)
        die_with_parent(parent)
        terminal = terminal_or_none()
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
        from ddptrain.worker import run_forked

        console = Console(ranks.rank, terminal)
        job, diagnostics, reports = assignment.job, assignment.diagnostics, assignment.reports
        code = run_forked(assignment.config, ranks, console, job=job, diagnostics=diagnostics, reports=reports)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rank_printer(log_format: str) -> Callable[[WorkerProcess, bytes], None]:
    """Prints one line of a rank's output, without its end, and keeps it in the rank's log where there is one.

    Args:
        log_format: text, json_line ``[rank N]``; or json, one object per line.
    """
    return _print_json if log_format == "json" else _print_text


def launcher_printer(log_format: str) -> Callable[[str], None]:
    """Prints a line of the launcher's own, which is no rank."""
    return lambda text: print(json_line(None, text) if log_format == "json" else text, flush=True)


def _print_text(child: WorkerProcess, line: bytes) -> None:
    sys.stdout.buffer.write(b"[rank %d] %s\n" % (child.rank, line))
    _keep(child, line + b"\n")


def _print_json(child: WorkerProcess, line: bytes) -> None:
    encoded = json_line(child.rank, line.decode(errors="replace")).encode() + b"\n"
    sys.stdout.buffer.write(encoded)
    _keep(child, encoded)


def _keep(child: WorkerProcess, line: bytes) -> None:
    if child.log:
        with contextlib.suppress(OSError):  # a full --log-dir must not cost the training; the line was printed
            child.log.write(line)


# What NCCL's watchdog thread prints before it aborts a rank whose peer is gone or silent: not a fault of that rank.
_NCCL_LOST = re.compile(
    r"(ProcessGroupNCCL|\[PG .*Rank \d+\]|NCCL).*(watchdog|remote process exited|collective operation timeout)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass
class WorkerProcess:
    """One started rank as the launcher sees it."""

    rank: int
    pid: int
    output: int
    reports: int
    log: BinaryIO | None = None
    diagnostics: Diagnostics | None = None
    process: subprocess.Popen[bytes] | None = None  # keeps a spawned child's handle alive
    tail: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=50))
    unfinished: bytes = b""
    report: bytes = b""
    status: int | None = None
    ended: float = 0.0
    killed_by_us: bool = False


@dataclass
class WorkerGroup:
    """All ranks of this node, and what was asked of them."""

    children: list[WorkerProcess] = field(default_factory=list)
    stop_signal: int | None = None
    deadline: float | None = None
    verdict: Report | None = None  # of the watchdog, once it has found a hang


def root_cause(node: WorkerGroup) -> Report:
    """The report that explains the node's end: its own fault before a lost peer, then whichever came first."""
    reports = [(child, report_of(child)) for child in node.children]
    failed = [(child, report) for child, report in reports if report["code"] != 0 and not child.killed_by_us]
    if node.verdict and (node.verdict["cause"] == "own" or not failed):
        return _with_checkpoint(node.verdict, [report for _, report in reports])
    if not failed:
        failed = [(child, report) for child, report in reports if report["code"] != 0]
        if failed and node.stop_signal is not None:
            return {**failed[0][1], **_stopped_by_force(node.stop_signal)}
    if not failed:
        return reports[0][1]
    failed.sort(key=lambda pair: (pair[1].get("cause") == "peer", pair[0].ended))
    return _with_checkpoint(failed[0][1], [report for _, report in reports])


def _with_checkpoint(cause: Report, reports: list[Report]) -> Report:
    """The report with the last checkpoint in it, which only rank 0 knows."""
    if cause.get("checkpoint") is None:
        cause["checkpoint"] = next((r["checkpoint"] for r in reports if r.get("checkpoint")), None)
    return cause


def _stopped_by_force(number: int) -> Report:
    name = signal.Signals(number).name
    message = (
        f"{name} was passed on, but no rank ended within the grace; killed, progress since the last checkpoint is lost"
    )
    return {
        "outcome": "stopped",
        "code": exit_codes.STOPPED,
        "signal": None,
        "saved": False,
        "exception": "Stopped",
        "kind": "Stopped",
        "message": message,
        "hint": None,
        "next": None,
    }


def report_of(child: WorkerProcess) -> Report:
    """What the rank said, or what its status and its last breadcrumb say where it could not."""
    assert child.status is not None
    code = os.waitstatus_to_exitcode(child.status)
    try:
        report: Report = json.loads(child.report)
        if report["code"] == code:
            return report
    except (ValueError, KeyError):
        pass
    crumb = child.diagnostics.crumb() if child.diagnostics else None
    place = {"step": crumb.step, "phase": crumb.collective or crumb.phase} if crumb else {}
    if code < 0:
        report = termination.killed(-code, rank=child.rank, progress=place)
        if -code == signal.SIGABRT and _NCCL_LOST.search(b"\n".join(child.tail).decode(errors="replace")):
            report |= {"cause": "peer", "message": f"{report['message']}: NCCL's watchdog, after a peer was lost"}
        return report
    message = f"rank {child.rank} left with code {code} and no report"
    return termination.failure(RuntimeError(message), rank=child.rank, progress=place) | {"code": code}


_CHUNK = 65536


def run_with_timeout(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, which must be JSON-able; None if it fails, or takes longer.

    It runs in a child: what it changes in memory is lost. A child that does not answer is killed; where even that
    must wait for the volume, it is left behind.
    """
    parent, (ours, theirs) = os.getpid(), os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as answer, contextlib.suppress(OSError, ValueError):
        try:
            pid = os.fork()
            if pid == 0:
                _answer(work, theirs, parent)
        finally:
            os.close(theirs)
        content = _read(answer.fileno(), time.monotonic() + seconds)
        _end(pid, killed=content is None)
        return json.loads(content) if content else None
    return None


def _read(descriptor: int, deadline: float) -> bytes | None:
    """All that comes until the other end closes; None if it does not in time."""
    content = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, _CHUNK)
        if not part:
            return content
        content += part
    return None


def _end(pid: int, *, killed: bool) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if killed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # else the supervisor's loop, or init, collects it
        else:
            os.waitpid(pid, 0)


def _answer(work: Callable[[], Any], pipe: int, parent: int) -> NoReturn:

    try:
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)
        with os.fdopen(pipe, "wb") as stream:
            stream.write(json.dumps(work()).encode())
    finally:
        os._exit(0)
