"""The rank processes of one node: how they start, how their output is printed, and which one explains the node's end.

A fork takes milliseconds, a fresh interpreter with torch seconds. The launcher must stay safe to fork: it runs no
tensor operation, starts no thread and never initializes CUDA, because a child inherits locks and half-initialized
runtimes, but not the threads that would release them.
"""

import collections
import contextlib
import faulthandler
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, BinaryIO, NoReturn

from ddprun.diagnostics import Diagnostics, crashed_frame
from ddprun.distributed.topology import Ranks
from ddprun.errors import Stopped, TrainerError, cuda_error, exited_early, nccl_error
from ddprun.files import Json, close_all_but, dumps_json, open_descriptors
from ddprun.heartbeat import RETURNED
from ddprun.program import Program, RankProcess
from ddprun.reporting import termination
from ddprun.reporting.console import (
    never_fail_or_wait,
    release_output,
)
from ddprun.reporting.termination import Report
from ddprun.signals import STOP_SIGNALS, die_with_parent

_CANCEL_INTERVAL = 0.1  # seconds
LONGEST_LINE = 65536  # bytes
_BAR_SECONDS = 10.0  # between two lines of a progress bar
_LAST_LINES = 50  # that may say why a signal ended a rank
_CRASH = "Fatal Python error: "  # by faulthandler, which then prints the stacks
_CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
# NCCL's watchdog thread prints this before it aborts a rank whose peer is lost: not a fault of that rank.
_NCCL_LOST = re.compile(
    r"(ProcessGroupNCCL|\[PG .*Rank \d+\]|NCCL).*"
    r"(watchdog|remote process exited|collective operation timeout|unhandled system error|ncclSystemError)",
    re.IGNORECASE | re.DOTALL,
)
# A failure of the rank's own GPU or kernel, which the same thread prints.
_OWN_CUDA = re.compile(r"CUDA error:|unhandled cuda error|uncorrectable ECC|\bXid\b", re.IGNORECASE)


@dataclass(frozen=True)
class WorkerSpec:
    """What a rank's process needs to know, with the descriptors that it writes to."""

    program: Program
    ranks: Ranks
    output: int
    reports: int
    diagnostics: Diagnostics
    parent: int


@dataclass
class WorkerProcess:
    """One started rank, as the launcher sees it."""

    rank: int
    pid: int
    output: int
    reports: int
    diagnostics: Diagnostics
    sends_an_ending: bool = True  # see ``Program``
    prefix: bytes = b""  # of each line that is printed
    log: BinaryIO | None = None
    process: subprocess.Popen[bytes] | None = None  # keeps a spawned child's handle alive
    tail: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=4 * _LAST_LINES))
    unfinished: bytes = b""
    drawn: float = 0.0  # when the line without an end began, or what it shows was printed last
    ending: bytes = b""  # as JSON
    status: int | None = None
    ended: float = 0.0
    failed: float = 0.0  # when it reported a failure, which may be long before its end; 0 if it did not
    killed_by_us: bool = False
    returned: bool = False  # its script had returned when the launcher began to end it

    @property
    def has_returned(self) -> bool:
        """Whether the script of this rank has returned, although its process may not have ended."""
        last = self.diagnostics.last_heartbeat()
        return not self.sends_an_ending and last.phase == RETURNED and not last.collective

    @property
    def place(self) -> Json:
        """Return step and phase of the last heartbeat, for a report."""
        last = self.diagnostics.last_heartbeat()
        return {"step": last.step, "phase": last.collective or last.phase}

    def take(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that the data ends, and from time to time what a progress bar shows.

        A container runtime logs whole lines, so the bar of an epoch would be seen at its end.
        """
        is_new = not self.unfinished
        lines, self.unfinished = split_lines(self.unfinished, data)
        if lines or is_new:
            self.drawn = now
        elif b"\r" in data and now - self.drawn >= _BAR_SECONDS:
            self.drawn, lines = now, [self.unfinished.rstrip(b"\r")]
        return lines

    def close(self) -> None:
        """Release the descriptors of an ended rank."""
        for descriptor in (self.output, self.reports):
            os.close(descriptor)
        self.diagnostics.close()


def line_prefix(ranks: Ranks) -> bytes:
    """Return what is printed before each line of a rank: its node and global rank; nothing if it is the only rank."""
    return b"" if ranks.world_size == 1 else b"[n%dr%d] " % (ranks.node_rank, ranks.rank)


def start(
    program: Program, ranks: Ranks, *, spawns: bool = False, opened: Collection[int] = (), log: BinaryIO | None = None
) -> WorkerProcess:
    """Start one rank, whose output and report come back through pipes.

    Args:
        spawns: in an interpreter of its own.
        opened: see ``LaunchOptions``.
        log: gets the rank's output, too; see ``LogFiles``.
    """
    pipes = [*os.pipe()]
    try:
        pipes += os.pipe()
        diagnostics = Diagnostics.create(ranks.rank)
    except OSError:  # no descriptor is left
        for descriptor in pipes:
            os.close(descriptor)
        raise
    output, output_write, reports, reports_write = pipes
    spec = WorkerSpec(program, ranks, output_write, reports_write, diagnostics, os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that reached the child before it has handlers would be lost, or would end it without a report.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = None
        descriptors = (output_write, reports_write, *astuple(diagnostics))
        if spawns:
            script = "from ddprun.launcher.processes import run_spawned; run_spawned()"
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            command = [sys.executable, *flags, "-c", script, pickle.dumps(spec).hex()]
            process = subprocess.Popen(command, stdout=output_write, stderr=output_write, pass_fds=descriptors)
        pid = process.pid if process else os.fork()
        if pid == 0:
            _run_worker(spec, (*descriptors, *opened))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.close(output_write)
    os.close(reports_write)
    for descriptor in (output, reports):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
    prefix = line_prefix(ranks)
    return WorkerProcess(ranks.rank, pid, output, reports, diagnostics, program.sends_an_ending, prefix, log, process)


def run_spawned() -> NoReturn:
    """Run the rank that the interpreter's first argument describes."""
    if sys.path[:1] == [""]:  # of ``python -c``, unless the user has excluded it: a script has its own folder there
        del sys.path[0]
    never_fail_or_wait()
    spec: WorkerSpec = pickle.loads(bytes.fromhex(sys.argv[1]))  # noqa: S301 - from the launcher
    _run_worker(spec, open_descriptors())


def _run_worker(spec: WorkerSpec, descriptors: Collection[int]) -> NoReturn:
    """In the child: undo what the launcher set up, run the rank, and exit without the parent's exit handlers.

    Args:
        descriptors: those that the rank keeps; the others are the launcher's, and other ranks'.
    """
    code, ranks = 1, spec.ranks
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # As under torchrun: Ctrl-C at a terminal reaches only the launcher, which passes it on once, and a rank cannot
        # open /dev/tty. In the session of the terminal, a rank that asked for a password was stopped without a word.
        os.setsid()
        die_with_parent(spec.parent)
        release_output()  # the launcher always reads what its ranks write
        close_all_but(descriptors)
        if ranks.nproc_per_node > 1 or os.isatty(0):  # whose prompt would not be seen: it is not a whole line
            _replace(0, os.open(os.devnull, os.O_RDONLY))
        os.dup2(spec.output, 1)
        _replace(2, spec.output)
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # the report of a crash reads the line from the output
        for descriptor in (spec.reports, *astuple(spec.diagnostics)):
            os.set_inheritable(descriptor, False)  # by programs that the rank starts
        os.environ |= ranks.environment()
        code = spec.program.run(RankProcess(ranks, spec.diagnostics, spec.reports))
    except BaseException as error:  # before the worker could report, such as a torch that cannot be imported
        if isinstance(error, TrainerError):  # of what the user asked for: no code of the program has run
            print(error.lines(), file=sys.stderr, flush=True)
            error.__traceback__ = None
        else:
            traceback.print_exc()
        report = termination.failure(error, rank=ranks.rank, progress={"phase": "start"})
        with contextlib.suppress(OSError):
            os.write(spec.reports, dumps_json(report).encode())
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the program may have closed or replaced it
                    stream.flush()
        finally:
            os._exit(code)  # in any case: a fork must not go on as a second launcher


def _replace(descriptor: int, by: int) -> None:
    os.dup2(by, descriptor)
    os.close(by)


def split_lines(unfinished: bytes, data: bytes) -> tuple[list[bytes], bytes]:
    """Return (whole lines, the begun line) of ``unfinished`` and the ``data`` that follows it.

    A carriage return begins the line again, so a progress bar costs as much as what it shows, and not as much as all
    that it has drawn. A line that is longer than LONGEST_LINE is divided.
    """
    first, *others = data.split(b"\n")
    lines = [unfinished + first, *others]
    begun = lines.pop()
    if b"\r" in begun:
        begun = begun.rstrip(b"\r").rpartition(b"\r")[2] + b"\r" * begun.endswith(b"\r")
    while len(begun) > LONGEST_LINE:
        lines.append(begun[:LONGEST_LINE])
        begun = begun[LONGEST_LINE:]
    return lines, begun


def launcher_line(text: str) -> None:
    """Print a line of the launcher's own, which may quote what a program or another node has said."""
    print(termination.printable(text), flush=True)


def rank_line(worker: WorkerProcess, line: bytes) -> None:
    """Write one line of a rank, without its newline, to the buffers of stdout and of the rank's log file."""
    sys.stdout.buffer.write(worker.prefix + line + b"\n")
    if worker.log:
        worker.log.write(line + b"\n")


def root_cause(
    workers: Sequence[WorkerProcess], *, stop_signal: int | None = None, decided: Report | None = None
) -> Report:
    """Return the report that explains the node's end: a rank's own failure before a lost peer, then the earliest.

    Peers exit milliseconds after the failed rank and often report first, so the order in time is not enough.

    Args:
        stop_signal: the first signal that was passed on to the ranks.
        decided: why the launcher itself has ended the ranks.
    """
    reports = [(worker, _after_stop(report_of(worker), stop_signal)) for worker in workers]
    failed = [(worker, report) for worker, report in reports if report["code"] != 0]
    unforced = [(worker, report) for worker, report in failed if worker.failed or not worker.killed_by_us]
    if decided and (decided["cause"] == "own" or not unforced):
        cause = decided
    elif not failed:
        return _after_stop(reports[0][1], stop_signal, all_ended=not workers[0].sends_an_ending)
    elif not unforced and stop_signal is not None:
        name = signal.Signals(stop_signal).name
        message = f"{name} was passed on, but no rank ended within the grace: killed, and nothing was saved"
        stopped = Stopped(message, saved=False)
        return termination.failure(stopped, rank=failed[0][1]["rank"], progress=failed[0][1])
    else:
        cause = min(unforced or failed, key=_precedence)[1]
        if cause.get("cause") == "peer" and (left := _left_early(workers)):
            cause = left
    if cause.get("checkpoint") is None:  # only rank 0 knows it
        cause["checkpoint"] = next((r["checkpoint"] for _, r in reports if r.get("checkpoint")), None)
    return cause


def _precedence(pair: tuple[WorkerProcess, Report]) -> tuple[bool, bool, float]:
    """Return the sort key of the root cause: an own failure, a stop for which a rank has saved, the earliest."""
    worker, report = pair
    return report.get("cause") == "peer", report.get("saved") is False, worker.failed or worker.ended


def _after_stop(report: Report, stop_signal: int | None, *, all_ended: bool = False) -> Report:
    """Return the report of a rank that a stop signal has ended as that of a stop, and not of a failure.

    Args:
        all_ended: all ranks ended with exit code 0, and it is not known whether that was the end of the training.
    """
    if stop_signal is None or not (all_ended or report.get("signal") == stop_signal):
        return report
    name = signal.Signals(stop_signal).name
    message = f"{name} was passed on, and all ranks ended with exit code 0" if all_ended else f"{name} ended the rank"
    return termination.failure(Stopped(message, saved=False), rank=report["rank"], progress=report)


def _left_early(workers: Sequence[WorkerProcess]) -> Report | None:
    """Return the report of a script's rank that ended with exit code 0 while another lost a peer; None for none.

    The launcher may have killed it since, while its process ended.
    """
    early = [w for w in workers if not w.sends_an_ending and not w.failed and (w.has_returned or w.status == 0)]
    if not early:
        return None
    first = min(early, key=lambda w: w.diagnostics.last_heartbeat().time if w.has_returned else w.ended)
    how = "ended its script with exit code 0" if first.has_returned else "exited with code 0 and no report"
    error = exited_early(f"rank {first.rank} {how}, and its peers lost it")
    return termination.failure(error, rank=first.rank, progress=first.place)


def is_fenced(workers: Sequence[WorkerProcess]) -> bool:
    """Return whether the program of a rank reports that it can save no more beside a newer attempt."""
    texts = (worker.diagnostics.last_progress() for worker in workers)
    return any(json.loads(text).get("fenced") is True for text in texts if text)


def sent_report(worker: WorkerProcess) -> Report | None:
    """Return the report that a rank sent; None if it sent none, or ended later with another exit code.

    A script's rank sends a failure at once: what happens to it later, such as a kill, is no cause. A signal that ends a
    rank after it has sent a success, such as a library's crash in an exit handler, is no failure of the training.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        report: Report = json.loads(worker.ending)
        code = report["code"] if worker.status is None else os.waitstatus_to_exitcode(worker.status)
        if worker.failed or report["code"] == code or (report["code"] == 0 and code < 0):
            return report
    return None


def failed_silently(report: Report, workers: Sequence[WorkerProcess]) -> bool:
    """Return whether the rank of the node's report failed without a word to its peers; a stop is no failure."""
    silent = any(worker.rank == report["rank"] and not sent_report(worker) for worker in workers)
    return silent and report.get("outcome") == "failed"


def report_of(worker: WorkerProcess) -> Report:
    """Return the report that the rank sent; without one, a report from its exit status and its last heartbeat."""
    if report := sent_report(worker):
        return report
    assert worker.status is not None
    code = os.waitstatus_to_exitcode(worker.status)
    if code < 0 and worker.returned:
        return termination.done(f"rank {worker.rank} ended its script, and its process by a signal", rank=worker.rank)
    if code < 0:
        return _report_of_signal(worker, -code)
    message = f"rank {worker.rank} exited with code {code} and no report"
    if last_line := next((line for line in reversed(worker.tail) if line.strip()), b""):
        message += f"; its last line: {last_line.decode(errors='replace').strip()[:300]}"
    if code == 0 and not worker.sends_an_ending:
        return termination.done(f"rank {worker.rank} ended with exit code 0", rank=worker.rank)
    if code == 0:
        return termination.failure(exited_early(message), rank=worker.rank, progress=worker.place)
    return termination.failed(code, "Error", message, rank=worker.rank, progress=worker.place)


def _report_of_signal(worker: WorkerProcess, number: int) -> Report:
    """Return the report of a rank that a signal has ended, with what its last lines say about the cause."""
    report = termination.killed(number, rank=worker.rank, progress=worker.place)
    tail, stacks = b"\n".join(worker.tail).decode(errors="replace"), ""
    if number in _CRASHES and _CRASH in tail:
        tail, _, stacks = tail.rpartition(_CRASH)
    if where := crashed_frame(stacks):
        report |= {"where": where}
        if number != signal.SIGBUS:
            report |= {"next": f"the stack of rank {worker.rank} is in the output above"}
    last_lines = tail.strip().split("\n")[-_LAST_LINES:]
    tail = "\n".join(last_lines)
    aborted = number == signal.SIGABRT or stacks.startswith("Aborted")  # a dump of changing threads may end by SIGSEGV
    if own := _OWN_CUDA.search(tail):
        line = tail[tail.rfind("\n", 0, own.start()) + 1 :].partition("\n")[0].strip()
        error = cuda_error(line)
        report |= _explained(report, error)
        if aborted:  # raised by Python or by NCCL's watchdog, whichever was faster
            report |= {"kind": error.kind}
    elif aborted and _NCCL_LOST.search(tail):
        failed = nccl_error(tail)
        if failed is None or failed.cause == "peer":
            report |= {"cause": "peer", "message": f"{report['message']}: NCCL's watchdog, after a peer was lost"}
        else:
            report |= _explained(report, failed)
    elif aborted and tail:  # a library says why before it aborts the process
        report |= {"message": f"{report['message']}; its last line: {last_lines[-1].strip()[:300]}"}
    return report


def _explained(report: Report, error: TrainerError) -> Report:
    """Return the changed fields of a killed rank's report. error: found in the output of the rank."""
    return {"message": f"{report['message']}: {error}", "hint": error.hint, "next": error.next_step}


def end_group(pid: int) -> None:
    """Tell what is left of a rank's process group to end, such as data loaders and programs that it has started.

    Not by SIGKILL: Python's resource tracker and torch's manager of shared memory first delete the rank's files.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def run_with_timeout(seconds: float, work: Callable[[], Any], cancelled: Callable[[], bool] = lambda: False) -> Any:
    """Return what ``work`` returns; None if it fails, takes longer or is cancelled.

    A file system whose server is gone blocks every process that uses it inside the kernel, and the launcher may start
    no thread. So ``work`` runs in a forked child, and its changes to memory are lost. A child that exceeds the timeout
    is killed and left behind if the volume delays even that.
    """
    import multiprocessing

    reader, writer = multiprocessing.Pipe(duplex=False)
    parent, end = os.getpid(), time.monotonic() + seconds

    def send_result() -> None:
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)
        with contextlib.suppress(Exception):
            writer.send(work())

    child = multiprocessing.get_context("fork").Process(target=send_result)
    with reader, contextlib.suppress(OSError, EOFError):
        child.start()
        writer.close()
        while not reader.poll(_CANCEL_INTERVAL):
            if time.monotonic() > end or cancelled():
                child.kill()
                return None
        result = reader.recv()
        child.join()
        return result
    return None
