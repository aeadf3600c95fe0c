"""What a failed node leaves beside the checkpoints (else in the log directory) for other nodes and for people to read.

``reports/<job>-<attempt>/node-1.json``: the node's report and what its launcher saw of every rank; beside it each
rank's stacks and flight recorder. Launchers write it before they kill, so that a node which only lost a peer can name
the hung rank of another; the verb ``why`` merges them. A volume that refuses or does not answer is ignored.

The ``why`` verb: who failed, out of the reports that all nodes left beside the checkpoints, judged side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ddptrain.config import Config
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import DataMissing, Hang
from ddptrain.files import dumps, share, write_atomically
from ddptrain.launcher.hang_detector import RankState, hang_report
from ddptrain.launcher.processes import WorkerProcess, run_with_timeout
from ddptrain.reporting.termination import Report

FOLDER = "reports"
_DUMPS = ("stacks.txt", "flight.json")
_KEPT = 10  # attempts
_PATIENCE = 1.5  # seconds for another node's report to appear
_VOLUME = 2.0  # seconds for the volume to answer


@dataclass(frozen=True)
class FailureReports:
    """One node's place to write to, and to look for the other nodes' words."""

    folder: Path
    node_rank: int
    nnodes: int
    ranks: range

    @classmethod
    def at(
        cls, config: Config, ranks: Ranks, log_dir: str, env: Mapping[str, str] = os.environ
    ) -> FailureReports | None:
        """The place of this attempt; None without a directory that could hold it."""
        root = config.checkpoint_dir or log_dir
        if not root:
            return None
        name = f"{env.get('DDPJOB_UID', '')[:5] or 'local'}-{env.get('DDPJOB_ATTEMPT') or '0'}"
        return cls(Path(root) / FOLDER / name, ranks.node_rank, ranks.nnodes, ranks.local_ranks)

    def clear(self) -> None:
        """Forget what an earlier life of this node under the same name has left, and of nodes that are no more."""
        run_with_timeout(_VOLUME, self._clear)

    def _clear(self) -> None:
        mine = {f"node-{self.node_rank}.json", *(f"rank-{rank}.{name}" for rank in self.ranks for name in _DUMPS)}
        for path in self.folder.iterdir():
            kind, _, number = path.name.partition(".")[0].partition("-")
            last = {"node": self.nnodes, "rank": self.nnodes * len(self.ranks)}.get(kind)
            if path.name in mine or (last is not None and number.isdigit() and int(number) >= last):
                path.unlink(missing_ok=True)

    def write(self, report: Report, rank_states: Sequence[RankState], children: Sequence[WorkerProcess]) -> None:
        """Leave ``report`` and the dumps. Never raises."""
        run_with_timeout(_VOLUME, lambda: self._write(report, rank_states, children))

    def _write(self, report: Report, rank_states: Sequence[RankState], children: Sequence[WorkerProcess]) -> None:
        for folder in (self.folder.parent, self.folder):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                share(folder, 0o2775)
        for child in children:
            self._write_dumps(child)
        content = {
            "schema": 1, "node": self.node_rank, "nnodes": self.nnodes, "time": time.time(), "report": report,
            "ranks": [asdict(rank_state) for rank_state in rank_states],
        }  # fmt: skip
        write_atomically(self._file(self.node_rank), dumps(content, indent=1).encode(), durable=False)
        self._retire()

    def _write_dumps(self, child: WorkerProcess) -> None:
        texts = child.diagnostics.texts() if child.diagnostics else ("", "")
        for name, text in zip(_DUMPS, texts, strict=True):
            if text:
                write_atomically(self.folder / f"rank-{child.rank}.{name}", text.encode(), durable=False)

    def culprit_elsewhere(self) -> Report | None:
        """The report of a node that failed by its own fault, if it shows up soon."""
        found: Report | None = run_with_timeout(_PATIENCE + _VOLUME, self._culprit_elsewhere)
        return found

    def _culprit_elsewhere(self) -> Report | None:
        end = time.monotonic() + _PATIENCE
        while True:
            for found in read(self.folder):
                if found["node"] != self.node_rank and found["report"].get("cause") == "own":
                    report: Report = found["report"]
                    return report
            if time.monotonic() > end or not self.folder.parent.parent.is_dir():
                return None
            time.sleep(0.05)

    def _file(self, node_rank: int) -> Path:
        return self.folder / f"node-{node_rank}.json"

    def _retire(self) -> None:
        attempts = sorted(self.folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in attempts[_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


def read(folder: Path) -> list[dict[str, Any]]:
    """The nodes' files in ``folder``, by node; damaged ones are left out."""
    found = []
    for path in sorted(folder.glob("node-*.json")) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes())
            if content["node"] < content["nnodes"] and float(content["time"]) and isinstance(content["report"], dict):
                found.append({**content, "ranks": [_known(rank) for rank in content["ranks"]]})
    # Of a run with another number of nodes, under the same name, something may be left; the newest file decides.
    nnodes = max(found, key=lambda content: content["time"])["nnodes"] if found else 0
    return sorted((content for content in found if content["nnodes"] == nnodes), key=lambda content: content["node"])


def _known(rank: Mapping[str, Any]) -> dict[str, Any]:
    """Of what was seen of a rank, all that a RankState has; another version may have written more."""
    return {field.name: rank[field.name] for field in fields(RankState)}


def with_root_cause(report: Report, other: Report) -> Report:
    """The report of a node that lost a peer, with the name of the rank to blame in it."""
    who = f"rank {other.get('rank')} failed with code {other.get('code')}: {other.get('message')}"
    return {**report, "message": f"{report.get('message')}; the cause: {who}"}


def merge_reports(nodes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[RankState]]:
    """(the report of the root cause, all ranks as they were seen) out of what the nodes left behind.

    A failure of a rank's own comes first, in order of time; a hang is judged anew with all nodes' ranks side by side.

    Args:
        nodes: the contents of ``node-*.json``, not empty.
    """
    rank_states = sorted((RankState(**rank) for node in nodes for rank in node["ranks"]), key=lambda s: s.rank)
    reports = [node["report"] for node in sorted(nodes, key=lambda node: (_blames_peer(node), node["time"]))]
    first: dict[str, Any] = reports[0]
    if first.get("code") == Hang.code and rank_states:
        all_ranks = len(nodes) == nodes[0]["nnodes"]
        timeout = max(s.quiet for s in rank_states)
        merged = hang_report(rank_states, timeout=timeout, all_ranks=all_ranks)
        if merged["cause"] == "own":
            return merged, rank_states
    return first, rank_states


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
        raise DataMissing(
            f"no report of a failure in {base}",
            hint="launchers write them beside the checkpoints, else into --log-dir",
            next_step="name the --checkpoint-dir or --log-dir of a run that failed",
        )
    nodes = read(attempts[-1])
    report, rank_states = merge_reports(nodes)
    if as_json:
        print(dumps({"attempt": attempts[-1].name, "report": report, "ranks": [asdict(s) for s in rank_states]}))
        return 0
    print(f"{attempts[-1].name}: {len(nodes)} of {nodes[0]['nnodes']} node(s) left a report in {attempts[-1]}")
    print(f"rank {report.get('rank')} is to blame, with code {report.get('code')}: {report.get('message')}")
    place = [f"{key} {report[key]}" for key in ("step", "phase", "where", "signal") if report.get(key) is not None]
    print("at " + ", ".join(place) if place else "where is not known")
    for label, advice in (("hint:  ", report.get("hint")), ("next:  ", report.get("next"))):
        if advice:
            print(label + str(advice))
    for s in rank_states:
        state = "stopped" if s.stopped else "silent" if not s.answered else "waits" if s.collective else "works"
        print(f"  rank {s.rank} (node {s.node}) {state} {s.place}; collectives begun: {s.collectives}")
    dumps_of = sorted(path.name for path in attempts[-1].glob("rank-*"))
    if dumps_of:
        print("dumps: " + ", ".join(dumps_of))
    return 0


def _newest(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.glob("node-*.json"))
