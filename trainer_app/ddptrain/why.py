"""Who kept the others waiting: one node's sightings, or those of all nodes merged, judged by the same rules.

``supervise`` asks when its node hangs; the verb ``why`` asks of the reports that all nodes left beside the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import DataError, Hang
from ddptrain.finite import dumps


@dataclass(frozen=True)
class Sighting:
    """One rank at the moment of the hang.

    Attributes:
        collective: what it waits in; empty while it works by itself.
        collectives: how many it has begun; the peers of one that has begun fewer wait for it.
        quiet: seconds without a sign of life.
        stopped: the process is stopped by a signal or a debugger.
        answered: it could still dump its stacks.
        where: ``file.py:line``, if it could.
    """

    rank: int
    node: int
    step: int
    phase: str
    collective: str
    collectives: int
    quiet: float
    stopped: bool
    answered: bool
    where: str | None

    @property
    def place(self) -> str:
        """What it was doing, in words."""
        doing = f"in {self.collective}" if self.collective else f"in phase {self.phase}"
        at = f" at {self.where}" if self.where else ""
        return f"{doing} of step {self.step}{at}"


def culprit(sightings: Sequence[Sighting], *, everybody: bool) -> Sighting | None:
    """The rank that the others wait for; None where all of these only wait, and another node must know.

    Args:
        everybody: these are all ranks, not only one node's. What is missing here could otherwise be elsewhere.
    """
    if not sightings:
        return None
    if stopped := [s for s in sightings if s.stopped]:
        return min(stopped, key=_progress)
    quiet = max(s.quiet for s in sightings) / 2  # a rank that still moves keeps nobody waiting
    if alone := [s for s in sightings if not s.collective and s.quiet >= quiet]:
        return min(alone, key=_progress)
    if silent := [s for s in sightings if not s.answered]:
        return min(silent, key=_progress)
    behind = min(sightings, key=lambda s: s.collectives)
    if everybody and behind.collectives < max(s.collectives for s in sightings):
        return behind
    return None


def _progress(sighting: Sighting) -> tuple[int, int]:
    return sighting.collectives, sighting.step


def hang_report(sightings: Sequence[Sighting], *, timeout: float, everybody: bool) -> dict[str, Any]:
    """The termination report of a node that hangs, code 76; its cause is ``peer`` where no rank of it is to blame."""
    guilty = culprit(sightings, everybody=everybody)
    others = [s for s in sightings if s is not guilty]
    waiting = "; ".join(f"rank {s.rank} waits {s.place}" for s in others[:4])
    if guilty:
        state = "is stopped" if guilty.stopped else "shows no sign of life"
        message = f"rank {guilty.rank} (node {guilty.node}) {state} {guilty.place}, {timeout:g} s without progress"
    else:
        message = f"{timeout:g} s without progress, and no rank of this node is to blame"
    shown = guilty or min(sightings, key=_progress)
    return {
        "schema": 1,
        "outcome": "failed",
        "code": 76,
        "cause": "own" if guilty or everybody else "peer",
        "rank": shown.rank,
        "step": shown.step,
        "phase": shown.collective or shown.phase,
        "signal": None,
        "exception": "Hang",
        "message": f"{message}; {waiting}" if waiting else message,
        "where": shown.where,
        "checkpoint": None,
    }


def judge(nodes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[Sighting]]:
    """(the report of the root cause, all ranks as they were seen) out of what the nodes left behind.

    A failure of a rank's own comes first, in order of time; a hang is judged anew with all nodes' ranks side by side.

    Args:
        nodes: the contents of ``node-*.json``, not empty.
    """
    sightings = sorted((Sighting(**rank) for node in nodes for rank in node["ranks"]), key=lambda s: s.rank)
    reports = [node["report"] for node in sorted(nodes, key=lambda node: (_blames_peer(node), node["time"]))]
    first: dict[str, Any] = reports[0]
    if first.get("code") == Hang.code and sightings:
        everybody = len(nodes) == nodes[0]["nnodes"]
        timeout = max(s.quiet for s in sightings)
        merged = hang_report(sightings, timeout=timeout, everybody=everybody)
        if merged["cause"] == "own":
            return merged, sightings
    return first, sightings


def _blames_peer(node: Mapping[str, Any]) -> bool:
    return bool(node["report"].get("cause") == "peer")


def explain(root: Path, *, as_json: bool) -> int:
    """Print who failed in the newest attempt that left a report below ``root``. Returns 0.

    Raises:
        DataError: there is none.
    """
    from ddptrain.postmortem import FOLDER, read

    base = root / FOLDER
    attempts = sorted((p for p in base.iterdir() if read(p)), key=_newest) if base.is_dir() else []
    if not attempts:
        raise DataError(
            f"no report of a failure in {base}",
            hint="launchers write them beside the checkpoints, else into --log-dir",
            next_step="name the --checkpoint-dir or --log-dir of a run that failed",
        )
    nodes = read(attempts[-1])
    report, sightings = judge(nodes)
    if as_json:
        print(dumps({"attempt": attempts[-1].name, "report": report, "ranks": [asdict(s) for s in sightings]}))
        return 0
    print(f"{attempts[-1].name}: {len(nodes)} of {nodes[0]['nnodes']} node(s) left a report in {attempts[-1]}")
    print(f"rank {report.get('rank')} is to blame, with code {report.get('code')}: {report.get('message')}")
    place = [f"{key} {report[key]}" for key in ("step", "phase", "where", "signal") if report.get(key) is not None]
    print("at " + ", ".join(place) if place else "where is not known")
    for s in sightings:
        state = "stopped" if s.stopped else "silent" if not s.answered else "waits" if s.collective else "works"
        print(f"  rank {s.rank} (node {s.node}) {state} {s.place}; collectives begun: {s.collectives}")
    dumps_of = sorted(path.name for path in attempts[-1].glob("rank-*"))
    if dumps_of:
        print("dumps: " + ", ".join(dumps_of))
    return 0


def _newest(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.glob("node-*.json"))
