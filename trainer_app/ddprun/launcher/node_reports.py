"""The reports that the nodes of a failed attempt leave beside the checkpoints, else in the log directory.

``reports/<job>-<attempt>/node-1.json`` holds a node's report and the states of its ranks; beside it are each rank's
stacks and flight recorder. Launchers write them before they kill, so that a node that only lost a peer can name the
hung rank of another. The verb ``why`` merges them. A volume that refuses or does not answer never ends a training.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddprun.distributed.topology import Ranks
from ddprun.errors import DataMissing, Hang
from ddprun.files import dumps_json, share, write_atomically
from ddprun.launcher.hang_detector import RankSnapshot, hang_report
from ddprun.launcher.lives import listed
from ddprun.launcher.peers import NodeFindings
from ddprun.launcher.processes import WorkerProcess, run_with_timeout
from ddprun.reporting.termination import Report, printable, root_cause_lines

FOLDER = "reports"
_DUMPS = ("stacks.txt", "flight.json")
_ROOT_FIELDS = (
    "code", "kind", "rank", "step", "exact", "phase", "signal", "exception", "where", "message", "hint", "next",
)  # fmt: skip
_STALL = "stall-"  # then the node: the stacks that other nodes have sent it during a stall
_TRACE = "trace-"  # then the rank alone: torchfrtrace --prefix trace- takes the rest of the name for the rank
_KEPT_ATTEMPTS = 100  # some KB each; the verb ``report`` shows the cause of every restart
_KEPT_DUMPS = 10  # the newest attempts that also keep their dumps, of up to 16 MB per rank
_OTHER_REPORT = 5.0  # seconds for another node's report to appear; SIGTERM ends the wait, because the cause is known
_VOLUME = 2.0  # seconds for the volume to answer
_STALL_FILES = 5.0  # seconds for it to take the files of a stall; a signal ends the wait


@dataclass(frozen=True)
class NodeReports:
    """The directory of one attempt's reports, as one node uses it."""

    folder: Path
    ranks: Ranks

    @classmethod
    def of_life(cls, checkpoint_dir: str, ranks: Ranks, log_dir: str, life: int) -> "NodeReports | None":
        """Return the reports of this life of this attempt; None without a directory to write to."""
        root = checkpoint_dir or log_dir
        if not root:
            return None
        name = f"{os.environ.get('DDPJOB_UID', '')[:5] or 'local'}-{os.environ.get('DDPJOB_ATTEMPT') or '0'}"
        return cls(Path(root) / FOLDER / (name if life == 1 else f"{name}.life-{life}"), ranks)

    def clear(self) -> None:
        """Delete what an earlier start of this node has left under the name of this one, which only the operator draws.

        Reports of ranks or nodes that this start does not have are of an earlier one, too. Those of the other nodes
        stay: a node may have failed before this one started.
        """

        def delete() -> None:
            for folder in (self.folder, *self.folder.parent.glob(f"{self.folder.name}.life-*")):
                for path in folder.iterdir() if folder.is_dir() else ():
                    if self._is_earlier(path.name):
                        path.unlink()

        run_with_timeout(_VOLUME, delete)

    def _is_earlier(self, name: str) -> bool:
        kind, _, number = name.partition(".")[0].partition("-")
        own, limit = self.ranks.local_ranks, self.ranks.world_size
        if kind in ("node", "stall"):
            own, limit = range(self.ranks.node_rank, self.ranks.node_rank + 1), self.ranks.nnodes
        known = kind in ("node", "stall", "rank", "trace") and number.isdecimal()
        return known and (int(number) in own or int(number) >= limit)

    def write(self, report: Report, states: Sequence[RankSnapshot], workers: Sequence[WorkerProcess]) -> None:
        """Write ``report``, the ranks' states, and the dumps of ``workers``. Never raises."""
        run_with_timeout(_VOLUME, lambda: self._write(report, states, workers))

    def _make_folder(self) -> None:
        for folder in (self.folder.parent, self.folder):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                share(folder, 0o2775)

    def _write_dumps(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            for name, text in zip(_DUMPS, worker.diagnostics.dumps(), strict=True):
                if text:
                    write_atomically(self.folder / f"rank-{worker.rank}.{name}", text.encode(), durable=False)
            if raw := worker.diagnostics.raw_trace():
                write_atomically(self.folder / f"{_TRACE}{worker.rank}", raw, durable=False)

    def _write(self, report: Report, states: Sequence[RankSnapshot], workers: Sequence[WorkerProcess]) -> None:
        self._make_folder()
        content = {
            "schema": 1, "node": self.ranks.node_rank, "nnodes": self.ranks.nnodes, "time": time.time(),
            "report": report, "ranks": [asdict(state) for state in states],
        }  # fmt: skip
        path = self.folder / f"node-{self.ranks.node_rank}.json"
        write_atomically(path, dumps_json(content, indent=1).encode(), durable=False)
        self._write_dumps(workers)  # after the report: they may be more than the volume takes in time
        attempts = sorted(self.folder.parent.iterdir(), key=_written, reverse=True)
        for old in attempts[_KEPT_ATTEMPTS:]:
            shutil.rmtree(old, ignore_errors=True)
        for dump in (path for attempt in attempts[_KEPT_DUMPS:_KEPT_ATTEMPTS] for path in dumps(attempt)):
            dump.unlink(missing_ok=True)

    def write_stall(
        self, findings: Sequence[NodeFindings], workers: Sequence[WorkerProcess], cancelled: Callable[[], bool]
    ) -> bool:
        """Write the dumps of ``workers``, and the stacks that other nodes found. Returns whether the volume took them.

        Args:
            cancelled: ends the wait; asked ten times a second.
        """

        def write() -> bool:
            self._make_folder()
            self._write_dumps(workers)
            if others := [found for found in findings if found.node != self.ranks.node_rank]:
                # One file: a node may have no volume or another, and a file for each of many ranks would take too long.
                texts = [f"rank {rank}:\n{text}\n" for found in others for rank, text in found.stacks.items()]
                path = self.folder / f"{_STALL}{self.ranks.node_rank}.{_DUMPS[0]}"
                write_atomically(path, "".join(texts).encode(), durable=False)
            return True

        return bool(run_with_timeout(_STALL_FILES, write, cancelled))

    def silent_nodes(self) -> list[int]:
        """Return the nodes that have left no report in the folder."""
        found = run_with_timeout(_VOLUME, lambda: [content["node"] for content in read(self.folder)])
        return silent_nodes(self.ranks.nnodes, found or range(self.ranks.nnodes))

    def cause_on_another_node(self, cancelled: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait briefly for a node that failed by itself, and return the content of its ``node-*.json``.

        Args:
            cancelled: ends the wait; asked ten times a second.
        """

        def wait() -> dict[str, Any] | None:
            end = time.monotonic() + _OTHER_REPORT
            while time.monotonic() < end and self.folder.parent.parent.is_dir():
                for found in read(self.folder):
                    if found["node"] != self.ranks.node_rank and found["report"].get("cause") == "own":
                        return found
                time.sleep(0.05)
            return None

        found: dict[str, Any] | None = run_with_timeout(_OTHER_REPORT + _VOLUME, wait, cancelled)
        return found


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of the ``node-*.json`` in ``folder``, by node, without those of another form."""
    found = []
    for path in sorted(folder.glob("node-*.json")) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes())
            if content["node"] < content["nnodes"] and float(content["time"]) and isinstance(content["report"], dict):
                found.append({**content, "ranks": [RankSnapshot(**rank) for rank in content["ranks"]]})
    # Files of a run with another number of nodes and the same name may remain; the newest file decides.
    nnodes = max(found, key=lambda content: content["time"])["nnodes"] if found else 0
    return sorted((content for content in found if content["nnodes"] == nnodes), key=lambda content: content["node"])


def silent_nodes(nnodes: int, reported: Iterable[int]) -> list[int]:
    """Return the nodes that left no report: their launcher was killed, or their machine is lost."""
    return sorted(set(range(nnodes)) - set(reported))


def without_report(nodes: Sequence[int]) -> str:
    """Return which nodes left no report, and what that means."""
    return f"no report of node {listed(nodes)}: its launcher was killed, its machine is lost, or it uses another volume"


def dumps(folder: Path) -> list[Path]:
    """Return the files of stacks and flight recorders in ``folder``."""
    return sorted(path for pattern in ("rank-*", f"{_TRACE}*", f"{_STALL}*.txt") for path in folder.glob(pattern))


def _written(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.glob("node-*.json")), default=0.0)


def with_root_cause(report: Report, node: Mapping[str, Any]) -> Report:
    """Return ``report`` of a node that lost a peer, with the failed rank of another node in its message and ``root``.

    The operator reads ``root`` if the pod of that node ends too late to report itself.

    Args:
        node: the content of the other node's ``node-*.json``.
    """
    other = node["report"]
    who = f"node {node['node']}" if other.get("rank") is None else f"rank {other['rank']}"
    cause = f"{who} failed with code {other.get('code')}: {other.get('message')}"
    root = {"node": node["node"]} | {key: other[key] for key in _ROOT_FIELDS if other.get(key) is not None}
    return {**report, "message": f"{report.get('message')}; the cause: {cause}", "root": root}


def merge_reports(nodes: Sequence[Mapping[str, Any]]) -> tuple[Report, list[RankSnapshot]]:
    """Return (the report of the root cause, the states of all ranks) from what the nodes wrote.

    A rank's own failure comes before a lost peer, then the earlier one. A hang is examined again with the ranks of all
    nodes.

    Args:
        nodes: the contents of ``node-*.json``, not empty.
    """
    states: list[RankSnapshot] = sorted((rank for node in nodes for rank in node["ranks"]), key=lambda s: s.rank)
    first: Report = min(nodes, key=lambda node: (node["report"].get("cause") == "peer", node["time"]))["report"]
    if first.get("code") == Hang.code and states:
        all_ranks = len(nodes) == nodes[0]["nnodes"]
        merged = hang_report(states, timeout=max(s.quiet for s in states), all_ranks=all_ranks)
        if merged["cause"] == "own":
            return merged, states
    return first, states


def explain(root: Path) -> int:
    """Print the cause of the newest attempt with a report below ``root``. Returns 0.

    Raises:
        DataError: there is no report.
    """
    base = root / FOLDER
    attempts = [path for path in base.iterdir() if read(path)] if base.is_dir() else []
    if not attempts:
        raise DataMissing(
            f"no report of a failure in {base}",
            hint="launchers write them beside the checkpoints, or into --log-dir without a checkpoint directory",
            next_step="name the --checkpoint-dir or --log-dir of a run that failed",
        )
    folder = max(attempts, key=_written)
    nodes = read(folder)
    report, states = merge_reports(nodes)
    print(f"{folder.name}: {len(nodes)} of {nodes[0]['nnodes']} node(s) left a report in {folder}")
    silent = silent_nodes(nodes[0]["nnodes"], [node["node"] for node in nodes])
    if silent and report.get("cause") == "peer" and "no report of node" not in str(report.get("message")):
        report = report | {"message": f"{report.get('message')}; {without_report(silent)}"}
    print("\n".join(root_cause_lines(report)))
    for s in states:
        condition = "stopped" if s.stopped else "silent" if not s.answered else "waits" if s.collective else "works"
        print(printable(f"  rank {s.rank} (node {s.node}) {condition} {s.place}; collectives begun: {s.collectives}"))
    if dump_files := dumps(folder):
        print(printable("dumps: " + ", ".join(path.name for path in dump_files)))
    return 0
