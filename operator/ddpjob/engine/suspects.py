"""Kubernetes nodes that new attempts avoid, because two failures within an hour point to them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ddpjob.api.limits import MAX_AVOIDED
from ddpjob.api.objects import Json
from ddpjob.api.times import seconds_since
from ddpjob.engine.attempt import whole_second_after

AVOID_SECONDS = 3600
"""For how long a node is avoided, and how far apart the two failures may be."""
UNSCHEDULABLE_SECONDS = 30
"""How long an attempt may find no Kubernetes node before it uses the avoided nodes again."""


def avoided(status: Mapping[str, Any], now: datetime) -> list[Json]:
    """Return the entries of ``status.avoidNodes`` whose time has not passed; a later one was made by a wrong clock."""
    entries = [(dict(entry), -seconds_since(entry["until"], now)) for entry in status.get("avoidNodes") or ()]
    return [entry for entry, left in entries if 0 < left <= AVOID_SECONDS + 1]


def avoided_after(status: Mapping[str, Any], failure: Mapping[str, Any], now: datetime) -> list[Json]:
    """Return the entries of ``status.avoidNodes`` after one more failure."""
    entries, node = avoided(status, now), failure.get("nodeName")
    if not node or not failure.get("nodeSuspected") or not _was_suspected(status.get("failures") or (), node, now):
        return entries
    new = {"nodeName": node, "reason": failure["reason"], "until": whole_second_after(now, AVOID_SECONDS)}
    return [*(entry for entry in entries if entry["nodeName"] != node), new][-MAX_AVOIDED:]


def _was_suspected(failures: Sequence[Mapping[str, Any]], node: str, now: datetime) -> bool:
    return any(
        f.get("nodeSuspected") and f.get("nodeName") == node and seconds_since(f["time"], now) <= AVOID_SECONDS
        for f in failures
    )
