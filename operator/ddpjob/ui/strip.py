"""Who waits for whom: how late each rank is over the last minutes, as a picture, and what the ranks do now. Pure."""

import base64
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ddpjob.cli.stacks import listed
from ddpjob.cli.text import number_of
from ddpjob.client.ranks import RankState, RankTable

COLUMNS, ROWS = 120, 512  # of the picture: looks, and ranks; of more ranks a row shows the latest of several
_PARTS = ("data", "forward", "backward", "communication", "optimizer", "script")
_UNKNOWN, _STEPS = 0, 8  # colours: of a rank that is not known, and how many for lateness
_NAMED = 0.1  # of a step: from that on the part is named in which a rank takes longer than the others
_LATEST = 0.5  # of a step: from that on a rank has the last colour
# Cividis-like steps from "on time" to "late", which differ in brightness too, on a grey that is neither.
PALETTE = bytes.fromhex("c9d0d82f6db04b80a86f949c97a78bbcb676dcb95cee9d45d1462f")


@dataclass(frozen=True)
class RankNow:
    """One rank for the table below the picture. late: share of a step for which the others wait for it."""

    rank: int
    node: int
    step: int
    does: str
    late: float | None
    part: str
    step_seconds: float | None


def lateness(ranks: Sequence[RankState]) -> list[float | None]:
    """Return for each rank the share of a step for which the others wait for it; None if that is not known.

    All ranks of DistributedDataParallel have equally long steps, so the rank that waits least is the latest one.
    Without the parts of steps, a rank that is behind in steps is late.
    """
    waits = [rank.parts.wait if rank.parts is not None else None for rank in ranks]
    known = [wait for wait in waits if wait is not None]
    if len(known) > 1:
        usual = median(known)
        return [
            None if wait is None else max(0.0, usual - wait) / (rank.step_seconds or 1.0)
            for wait, rank in zip(waits, ranks, strict=True)
        ]
    furthest = max((rank.step for rank in ranks), default=0)
    return [min(1.0, float(furthest - rank.step)) if furthest - rank.step > 1 else 0.0 for rank in ranks]


def ranks_now(table: RankTable) -> list[RankNow]:
    """Return the ranks, those that the others wait for first."""
    late, found = lateness(table.ranks), []
    known = [rank.parts for rank in table.ranks if rank.parts is not None]
    usual = {part: median(getattr(parts, part) for parts in known) for part in _PARTS} if known else {}
    for rank, share in zip(table.ranks, late, strict=True):
        does = f"waits in {rank.collective}" if rank.collective else rank.phase
        more = {part: getattr(rank.parts, part) - usual[part] for part in usual} if rank.parts is not None else {}
        part = max(more, key=lambda name: more[name], default="") if (share or 0.0) > _NAMED else ""
        found.append(RankNow(rank.rank, rank.node, rank.step, does, share, part, rank.step_seconds))
    return sorted(found, key=lambda one: (-(one.late or 0.0), one.rank))


def sentence(table: RankTable) -> str:
    """Return which ranks wait, in what, and which do not."""
    groups: dict[str, list[int]] = {}
    for rank in table.ranks:
        groups.setdefault(f"in {rank.collective or f'phase {rank.phase}'}", []).append(rank.rank)
    few = len(table.ranks) / 2
    parts = [
        f"{number_of(len(ranks), 'rank')} {what}" + (f" ({listed(ranks)})" if len(ranks) <= few else "")
        for what, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))[:4]
    ]
    if table.missing_nodes:
        parts.append(f"no answer of node {listed(sorted(table.missing_nodes)[:8])}")
    return "; ".join(parts)


@dataclass
class Strip:
    """How late the ranks were at the last looks: ranks × looks."""

    _looks: deque[list[int]] = field(default_factory=lambda: deque(maxlen=COLUMNS))

    def take(self, table: RankTable) -> None:
        """Add a look."""
        colours = [_UNKNOWN] * max(table.world_size, 1 + max((rank.rank for rank in table.ranks), default=0))
        for rank, late in zip(table.ranks, lateness(table.ranks), strict=True):
            colours[rank.rank] = _UNKNOWN if late is None else 1 + min(_STEPS - 1, int(late / _LATEST * (_STEPS - 1)))
        self._looks.append(colours)

    @property
    def rows(self) -> int:
        return min(ROWS, max(map(len, self._looks), default=0))

    def image(self) -> str:
        """Return the picture as the URL of a PNG, one pixel for each rank and look; empty without a look."""
        if not self._looks:
            return ""
        ranks = max(map(len, self._looks))
        each = -(-ranks // ROWS)
        blank = [[_UNKNOWN] * ranks] * (COLUMNS - len(self._looks))
        columns = [look + [_UNKNOWN] * (ranks - len(look)) for look in [*blank, *self._looks]]
        rows = [bytes(max(column[at : at + each]) for column in columns) for at in range(0, ranks, each)]
        return f"data:image/png;base64,{base64.b64encode(_png(rows)).decode()}"


def _png(rows: Sequence[bytes]) -> bytes:
    """Return a picture with the colours of PALETTE. https://www.w3.org/TR/png-3/"""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)  # 8 bits, a palette
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 6)
    parts = ((b"IHDR", head), (b"PLTE", PALETTE), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
