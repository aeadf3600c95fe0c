"""``ddpjob top``: what each rank of a job does now, and which of them is slow."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import duration, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.ranks import RankState, RankTable

_SLOW, _WAITING = 1.5, 0.3
"""A step so many times longer than the median, and a wait for data that is so much of a step, are abnormal."""
_LATE, _LATE_SECONDS = 5, 30.0
"""So is a heartbeat older than so many steps, and than this time without a known step."""
_PARTS = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "HOOK": "communication",
    "OPTIMIZER": "optimizer",
    "SCRIPT": "script",
    "WAITS": "wait",
}
"""Columns of the parts of a step, which are known of ranks of DistributedDataParallel."""


def top(name: Name, output: Form = "text", *, where: Where) -> int:
    """Show what each rank does: step, time of a step, wait for data, memory, last heartbeat.

    Only what is abnormal is in colour. It needs ddprun or ddptrain as the launcher, and on a cluster the right to get
    pods/proxy. The JSON has the schema docs/reference/schemas/top.json.

    \b
    Example:
      ddpjob top mnist-cpu
    """
    from ddpjob.cli.card import troubles

    with find(name, where) as client:
        seen = client.ranks(name)
        if output == "json":
            print(json.dumps(seen.wire(), indent=2))
        else:
            print("; ".join([headline(seen), *troubles(client.get(name), datetime.now(UTC))]))
            show(ranks_table(seen))
    return 0


def headline(seen: "RankTable") -> str:
    """Return what is said about all ranks."""
    steps = [rank.step for rank in seen.ranks]
    parts = [f"{one_line(seen.job)} attempt {seen.attempt}", f"{len(seen.ranks)} of {seen.world_size} ranks"]
    if steps:
        parts.append(f"step {max(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}")
    if (middle := _median(seen.ranks)) is not None:
        parts.append(f"median {_seconds(middle)} a step")
    if seen.missing_nodes:
        shown = ", ".join(map(str, seen.missing_nodes[:8])) + (" …" if len(seen.missing_nodes) > 8 else "")
        parts.append(f"nothing is known of node {shown}")
    if seen.omitted_ranks:
        parts.append(f"{seen.omitted_ranks} ranks are left out")
    return f"{', '.join(parts)} ({one_line(seen.place)})"


def ranks_table(seen: "RankTable") -> "Table":
    """Return one row for each rank."""
    ranks, stalled = seen.ranks, seen.stall.rank if seen.stall else None
    middle, furthest = _median(ranks), max((rank.step for rank in ranks), default=0)
    parts = _PARTS if any(rank.parts for rank in ranks) else {}
    late = (seen.slow.rank, seen.slow.part) if seen.slow else None
    rows = [
        [
            Cell(f"n{rank.node}r{rank.rank}", rank.rank == stalled or (late is not None and rank.rank == late[0])),
            *_speed(rank, middle, furthest),
            *(_part(rank, part, is_abnormal=(rank.rank, part) == late) for part in parts.values()),
            *_last(rank),
        ]
        for rank in ranks
    ]
    header = ["RANK", "STEP", "STEP TIME", "MEDIAN", "DATA WAIT", *parts, "MEMORY", "HEARTBEAT", "DOES"]
    return table(header, rows, whole=("RANK",))


def _part(rank: "RankState", part: str, *, is_abnormal: bool) -> Cell:
    return Cell(_seconds(getattr(rank.parts, part) if rank.parts else None), is_abnormal)


def _speed(rank: "RankState", middle: float | None, furthest: int) -> Row:
    step, wait = rank.step_seconds, rank.data_wait_seconds
    ratio = step / middle if step and middle else None
    share = wait / step if wait is not None and step else None
    passed = rank.age_seconds / step if step else 0.0  # steps since the launcher of its node looked at it
    return [
        Cell(rank.step, furthest - rank.step > 1.5 + passed),
        Cell(_seconds(step), ratio is not None and ratio >= _SLOW),
        Cell(f"×{ratio:.2f}" if ratio is not None else "-", ratio is not None and ratio >= _SLOW),
        Cell(f"{_seconds(wait)} ({share:.0%})" if share is not None else "-", (share or 0.0) >= _WAITING),
    ]


def _last(rank: "RankState") -> Row:
    step = rank.step_seconds
    is_late = rank.age_seconds > (max(_LATE * step, 1.0) if step else _LATE_SECONDS)
    return [
        f"{rank.memory_bytes / 2**30:.2f} GiB" if rank.memory_bytes is not None else "-",
        Cell(f"{duration(rank.age_seconds)} ago", is_late),
        f"waits in {rank.collective}" if rank.collective else rank.phase,
    ]


def _median(ranks: "Sequence[RankState]") -> float | None:
    known = sorted(rank.step_seconds for rank in ranks if rank.step_seconds is not None)
    return known[len(known) // 2] if known else None


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
