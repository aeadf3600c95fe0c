"""The launcher's loop over its living ranks: output and signals are passed on, ends collected, hangs noticed.

``launch`` starts the ranks and calls ``supervise``; it returns when all have ended.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable

from ddptrain import postmortem
from ddptrain.culprit import Sighting, hang_report
from ddptrain.node import Child, Node, report_of
from ddptrain.watchdog import Watchdog

_PEER_GRACE = 2.0  # seconds for the other ranks to end by themselves after one failed
_OTHER_NODE = 5.0  # seconds for the node with the culprit to end it, and thereby our collectives


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
        node: Node,
        *,
        nnodes: int,
        wakeup: int,
        pending: list[int],
        stop_grace: float,
        say: Callable[[Child, bytes], None],
        tell: Callable[[str], None],
        watchdog: Watchdog | None,
        report: postmortem.Postmortem | None,
    ) -> None:
        self._node, self._nnodes, self._wakeup, self._pending = node, nnodes, wakeup, pending
        self._stop_grace, self._say, self._tell = stop_grace, say, tell
        self._watchdog, self._postmortem = watchdog, report
        self.sightings: list[Sighting] = []

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

    def _read(self, child: Child, descriptor: int, *, last: bool = False) -> bool:
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

    def _tell_early(self, child: Child) -> None:
        """The first failure of its own is written down before the ranks elsewhere wonder who is gone."""
        if self._postmortem is None or self._node.verdict or child.killed_by_us or self._nnodes == 1:
            return
        while self._read(child, child.reports, last=True):
            pass
        report = report_of(child)
        if report.get("cause") == "own" and report.get("outcome") == "failed" and report["code"] != 80:
            self._postmortem.write(report, self.sightings, [])

    def _look_for_a_hang(self) -> None:
        node, watchdog = self._node, self._watchdog
        if not self._watching or watchdog is None or not watchdog.stalled(node.children):
            return
        self.sightings = watchdog.examine(node.children)
        if not self.sightings:
            return
        node.verdict = hang_report(self.sightings, timeout=watchdog.timeout, everybody=self._nnodes == 1)
        self._tell(f"error: {node.verdict['message']}")
        if self._postmortem:
            self._postmortem.write(node.verdict, self.sightings, node.children)
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
