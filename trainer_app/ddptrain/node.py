"""What the launcher knows of its ranks, and which of their ends explains the node's: the root cause, not its echo.

Peers die milliseconds after the culprit and often report first, so time alone does not tell.
"""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from typing import BinaryIO

from ddptrain import termination
from ddptrain.blackbox import BlackBox
from ddptrain.termination import Report

# What NCCL's watchdog thread prints before it aborts a rank whose peer is gone or silent: not a fault of that rank.
_NCCL_LOST = re.compile(
    r"(ProcessGroupNCCL|\[PG .*Rank \d+\]|NCCL).*(watchdog|remote process exited|collective operation timeout)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass
class Child:
    """One started rank as the launcher sees it."""

    rank: int
    pid: int
    output: int
    reports: int
    log: BinaryIO | None = None
    box: BlackBox | None = None
    process: subprocess.Popen[bytes] | None = None  # keeps a spawned child's handle alive
    tail: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=50))
    unfinished: bytes = b""
    report: bytes = b""
    status: int | None = None
    ended: float = 0.0
    killed_by_us: bool = False


@dataclass
class Node:
    """All ranks of this node, and what was asked of them."""

    children: list[Child] = field(default_factory=list)
    stop_signal: int | None = None
    deadline: float | None = None
    verdict: Report | None = None  # of the watchdog, once it has found a hang


def root_cause(node: Node) -> Report:
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
        "code": 75,
        "signal": None,
        "saved": False,
        "exception": "Stopped",
        "message": message,
    }


def report_of(child: Child) -> Report:
    """What the rank said, or what its status and its last breadcrumb say where it could not."""
    assert child.status is not None
    code = os.waitstatus_to_exitcode(child.status)
    try:
        report: Report = json.loads(child.report)
        if report["code"] == code:
            return report
    except (ValueError, KeyError):
        pass
    crumb = child.box.crumb() if child.box else None
    place = {"step": crumb.step, "phase": crumb.collective or crumb.phase} if crumb else {}
    if code < 0:
        report = termination.killed(-code, rank=child.rank) | place
        if -code == signal.SIGABRT and _NCCL_LOST.search(b"\n".join(child.tail).decode(errors="replace")):
            report |= {"cause": "peer", "message": f"{report['message']}: NCCL's watchdog, after a peer was lost"}
        return report
    message = f"rank {child.rank} left with code {code} and no report"
    return termination.failure(RuntimeError(message), rank=child.rank, progress=place) | {"code": code}
