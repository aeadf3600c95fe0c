"""What node 0's launcher answers to ``GET /ranks``: one row for each rank of all nodes.

The launcher of a node measures the speed of its ranks from their heartbeats, once a second. It looks at their memory
when a client asks. Node 0 then asks the other launchers, over the connections of ``peers``, and answers with what they
sent last: the first answer may lack their ranks, and an answer soon after has them.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddprun import proc
from ddprun.distributed.topology import Ranks
from ddprun.files import Json
from ddprun.heartbeat import HeartbeatRecord
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers, Records
from ddprun.launcher.processes import WorkerProcess, launcher_line
from ddprun.launcher.replicas import Diverged, Replicas
from ddprun.launcher.slow_ranks import SlowRank, SlowRanks
from ddprun.reporting.progress import StepRate

SCHEMA = 1
MOST_RANKS = 2048  # in an answer, of some 200 bytes each
_INTERVAL = 1.0  # seconds between looks at the heartbeats
_ASK_INTERVAL = 0.5  # seconds between questions to the other nodes


@dataclass
class _Pace:
    """The speed of a rank, over the last 10 to 20 seconds or its last two steps."""

    steps: StepRate = field(default_factory=StepRate)
    began: float = field(default_factory=time.monotonic)
    last: HeartbeatRecord = field(default_factory=HeartbeatRecord)
    per_second: float | None = None

    def observe(self, record: HeartbeatRecord) -> None:
        if record.step != self.last.step:
            self.last, self.per_second = record, self.steps.after(record.step, record.time, record.waited)

    @property
    def data_wait(self) -> float | None:
        """Seconds per step that the rank waits for data; None if it has used no DataLoader, or has no speed yet."""
        if not self.per_second or not self.last.waited:
            return None
        return min(self.steps.wait, 1 / self.per_second)  # quick steps record their waits up to 0.1 s later


class NodeRanks:
    """The ranks of this node; on node 0 those of all nodes, as far as their launchers are connected."""

    def __init__(self, ranks: Ranks, peers: Peers, progress: NodeProgress) -> None:
        self._ranks, self._peers, self._progress = ranks, peers, progress
        self._slow, self._replicas = SlowRanks(ranks.nproc_per_node), Replicas(ranks.world_size)
        # By rank: the times of the last records, of steps and of parameters, that were passed on.
        self._given: dict[int, tuple[float, float]] = {}
        self._abstains = ""  # why the ranks of this node do not compare their parameters
        self._paces: dict[int, _Pace] = {}
        self._workers: Sequence[WorkerProcess] = ()
        self._next_look = self._next_question = 0.0

    def follow(self, workers: Sequence[WorkerProcess]) -> None:
        """Answer with these ranks from now on; none, before they are closed."""
        self._workers = workers
        self._paces = {worker.rank: _Pace() for worker in workers}
        self._slow, self._given, self._progress.slow = SlowRanks(self._ranks.nproc_per_node), {}, None
        self._replicas = Replicas(self._ranks.world_size)
        self._progress.diverged = self._progress.agreed_step = None
        self._peers.steps.clear()

    def turn(self) -> None:
        """Look at the heartbeats if it is time, and answer node 0. Call it at least once a second."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _INTERVAL
            for worker in self._workers:
                if worker.status is None:
                    self._paces[worker.rank].observe(worker.diagnostics.last_heartbeat())
            self._compare()
        if self._peers.is_asked_for_ranks:
            self._peers.give_ranks(self._rows())

    def _compare(self) -> None:
        """Pass on what the ranks of this node have recorded of their steps; on node 0, compare all ranks."""
        new = {worker.rank: records for worker in self._workers if any(records := self._new_records(worker))}
        self._tell_abstention()
        if not self._peers.is_leader:
            if new:
                self._peers.give_steps(new)
            return
        for rank, (sums, digests) in [*new.items(), *self._peers.steps]:
            self._slow.take(rank, sums)
            self._replicas.take(rank, digests)
        self._peers.steps.clear()
        nproc = self._ranks.nproc_per_node
        self._slow.leave(rank for node in self._peers.left for rank in range(node * nproc, (node + 1) * nproc))
        self._peers.left.clear()
        before, diverged = self._slow.verdict, self._replicas.verdict
        self._slow.turn(time.monotonic())
        self._replicas.turn()
        self._progress.agreed_step = self._replicas.agreed
        if self._slow.verdict is not before:
            self._report(before, self._slow.verdict)
        if self._replicas.verdict is not diverged:
            self._report_divergence(self._replicas.verdict)

    def _new_records(self, worker: WorkerProcess) -> Records:
        """Return what a rank has recorded since the last call; nothing of a rank that has ended."""
        if worker.status is not None:
            return [], []
        given = self._given.get(worker.rank, (0.0, 0.0))
        sums, digests = worker.diagnostics.step_records()
        new = [one for one in sums if one.time > given[0]], [one for one in digests if one.time > given[1]]
        newest = (each[-1].time if each else 0.0 for each in (sums, digests))
        self._given[worker.rank] = next(newest), next(newest)
        return new

    def _tell_abstention(self) -> None:
        """Say once why the parameters of the ranks are not compared."""
        if self._workers and (worker := self._workers[0]).status is None and not self._abstains:
            self._abstains = worker.diagnostics.abstention()
            if self._abstains:
                launcher_line(f"the parameters of the ranks are not compared: {self._abstains}")

    def _report_divergence(self, found: Diverged | None) -> None:
        """Show in the log, and in the progress report, that the ranks do not have the same parameters."""
        self._progress.diverged = None
        if found is None:
            launcher_line("the parameters of the ranks are not seen to differ any more")
            return
        name, nproc = self._tensor_name(found), self._ranks.nproc_per_node
        message, rank = found.message(name, nproc), found.ranks[0] if found.ranks else None
        self._progress.diverged = {
            "step": found.step, "agreedStep": found.agreed, "rank": rank,
            "node": None if rank is None else rank // nproc, "tensor": name, "cause": found.cause, "message": message,
        }  # fmt: skip
        launcher_line(f"warning: {message}")

    def _tensor_name(self, found: Diverged) -> str:
        """Return the name of the tensor, which the ranks of this node know as well."""
        _, layout, group, place = found.tensor
        with contextlib.suppress(LookupError, TypeError):
            return str(self._workers[0].diagnostics.tensor_names()[str(layout)][group][place])
        return f"tensor {place} of group {group}"

    def _report(self, before: SlowRank | None, now: SlowRank | None) -> None:
        """Show in the log, and in the progress report, which rank is slow."""
        self._progress.slow = None
        if now is not None:
            node = now.rank // self._ranks.nproc_per_node
            message = now.message(node)
            self._progress.slow = {
                "rank": now.rank, "node": node, "part": now.part, "seconds": _rounded(now.seconds),
                "stepSeconds": _rounded(now.step), "message": message, "throttled": _rounded(now.throttled_share),
            }  # fmt: skip
            launcher_line(f"warning: {message}")
        elif before is not None:
            launcher_line(f"rank {before.rank} is not slow any more")

    @property
    def diverged(self) -> Diverged | None:
        """Of node 0: the verdict on the parameters of all ranks; None for no difference."""
        return self._replicas.verdict

    @property
    def agreed_time(self) -> float | None:
        """Of node 0: when all ranks had the same parameters last, by time.monotonic; None if that is not known."""
        return self._replicas.agreed_time

    def steps_per_second(self) -> float:
        """Return the speed of the quickest rank of this node; 0 if it is not known."""
        return max((pace.per_second or 0.0 for pace in self._paces.values()), default=0.0)

    def answer(self) -> Json:
        """Of node 0: return the table, and ask the other nodes for theirs."""
        if (now := time.monotonic()) >= self._next_question:
            self._next_question = now + _ASK_INTERVAL
            self._peers.ask_for_ranks()
        rows = [row | {"node": 0} for row in self._rows()]
        for node, (received, given) in self._peers.rank_rows.items():
            rows += [row | {"node": node, "ageSeconds": round(row["ageSeconds"] + now - received, 3)} for row in given]
        rows.sort(key=lambda row: int(row["rank"]))
        known = {row["node"] for row in rows}
        return {
            "schema": SCHEMA, "worldSize": self._ranks.world_size,
            "missingNodes": [node for node in range(self._ranks.nnodes) if node not in known],
            "omittedRanks": max(0, len(rows) - MOST_RANKS),
            "ranks": [row | {"parts": self._parts(row["rank"])} for row in rows[:MOST_RANKS]],
        }  # fmt: skip

    def _parts(self, rank: int) -> Json | None:
        """Return the seconds of a step by part, with the wait for the other ranks; None if they are not known."""
        if (window := self._slow.windows.get(rank)) is None:
            return None
        return {name: _rounded(seconds) for name, seconds in (window.parts | {"wait": window.wait}).items()}

    def _rows(self) -> list[Json]:
        now = time.monotonic()
        return [self._row(worker, now) for worker in self._workers if worker.status is None]

    def _row(self, worker: WorkerProcess, now: float) -> Json:
        record, pace = worker.diagnostics.last_heartbeat(), self._paces[worker.rank]
        age = now - record.time if record.changes else now - pace.began
        return {
            "rank": worker.rank, "step": record.step, "phase": record.phase, "collective": record.collective,
            "ageSeconds": round(age, 3), "stepSeconds": _rounded(1 / pace.per_second if pace.per_second else None),
            "dataWaitSeconds": _rounded(pace.data_wait),
            "memoryBytes": sum(map(proc.resident_bytes, proc.tree(worker.pid))),
        }  # fmt: skip


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
