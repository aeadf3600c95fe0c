"""The node's launcher: import torch once, fork the node's ranks, watch them, and say how the node ended.

Importing torch takes seconds, a fork milliseconds. The parent must stay forkable: it runs no tensor operation, starts
no thread and never asks for CUDA, because a child inherits locks and half-initialised runtimes, but not the threads
that would release them. Its last act is the termination message: the root cause, not the first peer that noticed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ddptrain import termination
from ddptrain.config import Config
from ddptrain.console import Console, terminal_of
from ddptrain.cpus import calm_torch
from ddptrain.errors import Stopped, UsageError
from ddptrain.network import free_port
from ddptrain.node import Child, Node, root_cause
from ddptrain.ranks import Ranks
from ddptrain.stop import StopFlag

STOP_GRACE = 25.0  # seconds from SIGTERM to SIGKILL; under the 30 s that a pod has by default
_PEER_GRACE = 2.0  # seconds for the other ranks to end by themselves after one failed
_STOPPING = {signal.SIGTERM, signal.SIGINT}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def launch(config: Config, ranks: Ranks, stop: StopFlag, *, log_dir: str = "", stop_grace: float = STOP_GRACE) -> int:
    """Fork this node's ranks and wait for them. Returns the node's exit code: that of the root cause.

    Args:
        ranks: the node's place.
        stop: signals that came until now.
        log_dir: also keep each rank's output in ``rank-N.log`` there.
        stop_grace: seconds the ranks get to obey SIGTERM before they are killed.
    Raises:
        Stopped: a signal came before the first rank was forked.
        UsageError: ``log_dir`` cannot be made.
    """
    if log_dir:
        try:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--log-dir {log_dir} cannot be made: {error.strerror}",
                next_step="name a directory that can be written",
            ) from error
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_write, False)
    pending: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda n, _frame: pending.append(n))
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    preload()
    if stop.requested or signal.SIGTERM in pending or signal.SIGINT in pending:
        raise Stopped("stopped by a signal in phase start", saved=False)
    node = Node()
    for local_rank in range(ranks.nproc_per_node):
        node.children.append(_fork(config, ranks.child(local_rank), log_dir))
    _watch(node, wakeup, pending, stop_grace)
    report = root_cause(node)
    termination.write(report, termination.destination())
    return int(report["code"])


def preload() -> None:
    """Import everything a rank will need, and nothing that computes.

    ``torch._dynamo`` alone costs two seconds: the first optimizer that is constructed imports it, with some 900
    modules.
    """
    calm_torch()
    for module in ("torch._dynamo", "ddptrain.worker"):
        importlib.import_module(module)


def _fork(config: Config, ranks: Ranks, log_dir: str) -> Child:
    output_read, output_write = os.pipe()
    report_read, report_write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Until the child has a handler of its own, a signal passed on to it would go to its copy of ours, and be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    pid = os.fork()
    if pid == 0:
        _become_rank(config, ranks, parent, output_write, report_write)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    os.close(output_write)
    os.close(report_write)
    for descriptor in (output_read, report_read):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
    log = None
    if log_dir:
        log = (Path(log_dir) / f"rank-{ranks.rank}.log").open("ab", buffering=0)
    return Child(ranks.rank, pid, output_read, report_read, log)


def _become_rank(config: Config, ranks: Ranks, parent: int, output: int, reports: int) -> NoReturn:
    """In the child: shed the launcher, train, leave without running the parent's exit handlers."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A group of its own: Ctrl-C at a terminal reaches the launcher alone, which passes it on once.
        os.setpgid(0, 0)
        # Die with the launcher, also if it died before this line.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
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
        from ddptrain.worker import run_forked

        code = run_forked(config, ranks, Console(ranks.rank, terminal), reports)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(node: Node, wakeup: int, pending: list[int], stop_grace: float) -> None:
    """Pass output on, pass signals on, and end the other ranks once one has failed. Returns when all have ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ, None)
        for child in node.children:
            selector.register(child.output, selectors.EVENT_READ, child)
            selector.register(child.reports, selectors.EVENT_READ, child)
        while any(child.status is None for child in node.children):
            timeout = None if node.deadline is None else max(0.0, node.deadline - time.monotonic())
            for key, _ in selector.select(timeout):
                if key.data is None:
                    os.read(wakeup, 4096)
                elif not _read(key.data, key.fd):
                    selector.unregister(key.fd)
            _pass_on_signals(node, pending, stop_grace)
            _reap(node)
            if node.deadline is not None and time.monotonic() >= node.deadline:
                _kill(node)
    for child in node.children:
        for descriptor in (child.output, child.reports):
            while _read(child, descriptor, last=True):
                pass


def _read(child: Child, descriptor: int, *, last: bool = False) -> bool:
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
        sys.stdout.buffer.write(b"[rank %d] %s\n" % (child.rank, line))
        if child.log:
            child.log.write(line + b"\n")
    sys.stdout.buffer.flush()
    return bool(data)


def _pass_on_signals(node: Node, pending: list[int], stop_grace: float) -> None:
    while pending:
        number = pending.pop(0)
        if number == signal.SIGCHLD:
            continue
        if node.stop_signal is None:
            node.stop_signal = number
            node.deadline = min(node.deadline or float("inf"), time.monotonic() + stop_grace)
        for child in node.children:
            if child.status is None:
                os.kill(child.pid, number)


def _reap(node: Node) -> None:
    """Collect ended children; as PID 1 of a container also strangers, whose parents are gone."""
    by_pid = {child.pid: child for child in node.children}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in by_pid:
            by_pid[pid].status, by_pid[pid].ended = status, time.monotonic()
            if status != 0:
                node.deadline = min(node.deadline or float("inf"), time.monotonic() + _PEER_GRACE)


def _kill(node: Node) -> None:
    for child in node.children:
        if child.status is None and not child.killed_by_us:
            child.killed_by_us = True
            os.kill(child.pid, signal.SIGKILL)
    node.deadline = None


def with_port(ranks: Ranks, env_port: str | None) -> Ranks:
    """A node that trains alone needs no agreed port: any free one keeps two jobs on one machine apart."""
    if ranks.nnodes > 1 or env_port:
        return ranks
    return Ranks(**{**ranks.__dict__, "master_port": free_port()})
