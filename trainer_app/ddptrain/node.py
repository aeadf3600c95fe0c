"""What the launcher knows of its ranks, and which of their ends explains the node's: the root cause, not its echo.

Peers die milliseconds after the culprit and often report first, so time alone does not tell.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from typing import BinaryIO

from ddptrain import termination
from ddptrain.termination import Report


@dataclass
class Child:
    """One forked rank as the launcher sees it."""

    rank: int
    pid: int
    output: int
    reports: int
    log: BinaryIO | None = None
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


def root_cause(node: Node) -> Report:
    """The report that explains the node's end: its own fault before a lost peer, then whichever came first."""
    reports = [(child, _report_of(child)) for child in node.children]
    failed = [(child, report) for child, report in reports if report["code"] != 0 and not child.killed_by_us]
    if not failed:
        failed = [(child, report) for child, report in reports if report["code"] != 0]
        if failed and node.stop_signal is not None:
            return {**failed[0][1], **_stopped_by_force(node.stop_signal)}
    if not failed:
        return reports[0][1]
    failed.sort(key=lambda pair: (pair[1].get("cause") == "peer", pair[0].ended))
    cause = failed[0][1]
    if cause.get("checkpoint") is None:  # only rank 0 knows where it saved
        cause["checkpoint"] = next((r["checkpoint"] for _, r in reports if r.get("checkpoint")), None)
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


def _report_of(child: Child) -> Report:
    """What the rank said, or what its status says where it could not."""
    assert child.status is not None
    code = os.waitstatus_to_exitcode(child.status)
    try:
        report: Report = json.loads(child.report)
        if report["code"] == code:
            return report
    except (ValueError, KeyError):
        pass
    if code < 0:
        return termination.killed(-code, rank=child.rank)
    message = f"rank {child.rank} left with code {code} and no report"
    return termination.failure(RuntimeError(message), rank=child.rank, progress={}) | {"code": code}
