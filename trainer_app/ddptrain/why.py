"""The ``why`` verb: who failed, out of the reports that all nodes left beside the checkpoints, judged side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddptrain.culprit import Sighting, hang_report
from ddptrain.errors import DataError, Hang
from ddptrain.finite import dumps
from ddptrain.postmortem import FOLDER, read


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
