"""What node 0's launcher answers to a client that looks inside the ranks: their stacks, and profiles of their steps.

Unlike ``GET /ranks`` this costs the ranks time. So the path names the uid of the job, which those know who may read the
job or are in its pods, and one inspection and one profile at a time serve all clients. No answer waits for a rank: a
client begins by POST, and asks by GET until all is there. Below ``/jobs/UID``:

=============================  =====================================================================================
``POST /stacks``               begin an inspection, or join the one that has not begun yet: its number
``GET /stacks/N``              without ``ranks`` until inspection N has ended; then the states of all ranks, and stacks
``POST /profile/STEPS/SECS``   profile so many steps, in so many seconds: number of the profile
``GET /profile/N``             what the ranks say of profile N
``GET /profile/N/RANK/OFFSET`` a part of a trace, in base64; without ``data`` if its node has not sent it yet
=============================  =====================================================================================
"""

import base64
import contextlib
import hmac
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from ddprun.distributed.topology import Ranks
from ddprun.files import Json
from ddprun.heartbeat import activity
from ddprun.launcher.peers import NodeFindings, Peers
from ddprun.launcher.processes import WorkerProcess
from ddprun.launcher.rank_table import MOST_RANKS
from ddprun.reporting.http_port import NOT_FOUND, Answer, Request
from ddprun.step_profile import ProfileRequest

_MOST_STACKS = 2 * 2**20  # characters in an answer
_BETWEEN = 1.0  # seconds from the end of an inspection to the next
_MOST_STEPS, _LONGEST = 100, 600  # seconds
_AHEAD = 1.0  # seconds in which a request reaches all ranks
_PATIENCE = 10.0  # seconds until a rank begins that numbers its steps in another way
_PART = 2**20  # bytes of a trace in an answer; in base64 a third of the longest line of ``peers``
_ASK_INTERVAL, _PART_SECONDS = 1.0, 5.0  # seconds between questions to the other nodes; until a part is asked for again
_KEPT, _KEEP_INTERVAL = (
    60.0,
    10.0,
)  # seconds for which traces are kept that nobody reads; until all nodes hear of a reader
_READING = 5.0  # seconds from one request of a client to its next
_ENDED = ("done", "failed", "ended")


class LookInside:
    """One node's part, through all restarts of its ranks; of node 0 also the answers.

    Args:
        rate: returns the steps per second of a rank; 0 if they are not known.
    Attributes:
        wants_stacks: a client waits for an inspection, which may begin.
    """

    def __init__(
        self, ranks: Ranks, peers: Peers, rate: Callable[[], float], env: Mapping[str, str] = os.environ
    ) -> None:
        self._ranks, self._peers, self._rate = ranks, peers, rate
        self._uid = env.get("DDPJOB_UID", "").encode()
        self._workers: Sequence[WorkerProcess] = ()
        self._wanted, self._next_inspection = 0, 0.0  # the number of an inspection
        self._stacks: Json = {"number": 0}
        self._number, self._until, self._read, self._next_question, self._next_keep = 0, 0.0, 0.0, 0.0, 0.0
        self._is_void = False  # the ranks that were asked have ended
        self._rows: dict[int, list[Json]] = {}  # of the other nodes
        self._parts: dict[int, tuple[float, Json]] = {}  # by rank: when a part of its trace has come, until it is read
        self._asked_parts: dict[int, float] = {}  # by node: until when to wait for the part that it was asked for

    @property
    def wants_stacks(self) -> bool:
        return self._wanted > self._peers.inspections and time.monotonic() >= self._next_inspection

    def follow(self, workers: Sequence[WorkerProcess]) -> None:
        """Look inside these ranks from now on; none, before they are closed."""
        self._workers, self._until, self._is_void = workers, 0.0, True
        self._rows, self._parts, self._asked_parts = {}, {}, {}

    def take(self, findings: Sequence[NodeFindings]) -> None:
        """Take what an inspection of the ranks has found."""
        number = self._peers.inspections
        if not self._stacks["number"] < self._wanted <= number:
            return
        self._next_inspection = time.monotonic() + _BETWEEN
        known = {found.node for found in findings}
        states = sorted((state for found in findings for state in found.ranks), key=lambda state: state.rank)
        stacks = {rank: text for found in findings for rank, text in found.stacks.items()}
        places = [(activity(state.phase, state.collective), state.where) for state in states]
        counts, left, rows = Counter(places), _MOST_STACKS, []
        alone_first = sorted(zip(states, places, strict=True), key=lambda pair: counts[pair[1]])
        for state, _ in alone_first[:MOST_RANKS]:
            text = stacks.get(state.rank, "")
            rows.append(asdict(state) | {"stacks": text if len(text) <= left else ""})
            left -= len(rows[-1]["stacks"])
        self._stacks = {
            "number": number, "worldSize": self._ranks.world_size, "omittedRanks": len(states) - len(rows),
            "missingNodes": [node for node in range(self._ranks.nnodes) if node not in known],
            "ranks": sorted(rows, key=lambda row: int(row["rank"])),
        }  # fmt: skip

    def turn(self) -> None:
        """Do what other launchers have asked for. Call it at least once a second."""
        taken, self._peers.looks = self._peers.looks, []
        for node, message in taken:
            with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, OSError):  # no launcher's
                if self._peers.is_leader:
                    self._hear(node, message)
                else:
                    self._obey(message)
        now = time.monotonic()
        self._parts = {rank: (at, part) for rank, (at, part) in self._parts.items() if now < at + _PART_SECONDS}
        if self._until and now >= max(self._until, self._read) + _KEPT:
            self._until = 0.0
            self._ask_own(ProfileRequest())  # deletes the traces

    def answer(self, request: Request) -> Answer | None:
        """Answer a client of node 0; None for another path."""
        if not request.path.startswith(b"/jobs/"):
            return None
        _, _, uid, *words = request.path.split(b"/")
        if not self._uid or not hmac.compare_digest(uid, self._uid):
            return b"403 Forbidden", {"error": "this is not the uid of the job"}
        head, *words = words or [b""]
        if not all(word.isdigit() and len(word) < 16 for word in words):
            return NOT_FOUND
        return self._answer_to((request.method, head), [int(word) for word in words])

    def _answer_to(self, what: tuple[bytes, bytes], numbers: Sequence[int]) -> Answer:
        if what == (b"POST", b"stacks") and not numbers:
            return self._refused() or self._ask_for_stacks()
        if what == (b"POST", b"profile") and len(numbers) == 2:
            return self._refused() or self._begin(*numbers)
        if what == (b"GET", b"stacks") and len(numbers) == 1:
            return b"200 OK", self._stacks if self._stacks["number"] >= numbers[0] else {"number": numbers[0]}
        if what == (b"GET", b"profile") and len(numbers) == 1:
            return b"200 OK", self._reports(*numbers)
        if what == (b"GET", b"profile") and len(numbers) == 3 and numbers[1] < self._ranks.world_size:
            return b"200 OK", self._part(*numbers)
        return NOT_FOUND

    def _refused(self) -> Answer | None:
        if any(worker.status is None for worker in self._workers):
            return None
        return _refusal("no rank runs at the moment", "the ranks end or start again", "try again later")

    def _ask_for_stacks(self) -> Answer:
        self._wanted = self._peers.inspections + 1  # one under way may have begun before the request
        return b"200 OK", {"number": self._wanted}

    def _begin(self, steps: int, seconds: int) -> Answer:
        now, records = time.monotonic(), [worker.diagnostics.last_heartbeat() for worker in self._workers]
        if not 0 < steps <= _MOST_STEPS or not 0 < seconds <= _LONGEST:
            limits = f"at most {_MOST_STEPS} steps in {_LONGEST} s are profiled"
            return _refusal(limits, "a long profile takes memory of the pods", "ask for less")
        if now < self._until and not all(row["state"] in _ENDED for row in self._known_rows()):
            return _refusal("another profile runs", "one at a time", f"try again after {self._until - now:.0f} s")
        if now < self._read + _READING and any(row["state"] == "done" for row in self._known_rows()):
            again = f"try again after {_READING:g} s"
            return _refusal("a client reads the traces of the last profile", "a new profile deletes them", again)
        step = max(record.step for record in records)
        if step == 0:
            none = "none was made yet, or the ranks have no optimizer of torch.optim"
            return _refusal("no step of an optimizer is known", none, "try again when ddpjob top shows steps")
        self._number += 1
        self._rows, self._parts, self._asked_parts = {}, {}, {}
        rate = self._rate()
        begin = step + 1 + math.ceil(_AHEAD * rate)
        latest = _PATIENCE + 2 * (begin - step) / rate if rate else seconds / 2
        asked = {"number": self._number, "begin": begin, "steps": steps, "seconds": seconds, "latest": latest}
        self._peers.look(asked)
        self._obey(asked)
        return b"200 OK", {"number": self._number}

    def _obey(self, message: Json) -> None:
        """Do what node 0 asks for."""
        now = time.monotonic()
        if "keep" in message:
            self._note_reader(int(message["keep"]))
        elif "begin" in message:
            self._number, self._until = int(message["number"]), now + float(message["seconds"])
            self._is_void = False
            latest = min(now + float(message["latest"]), self._until)
            begin, steps = int(message["begin"]), int(message["steps"])
            self._ask_own(ProfileRequest(self._number, begin, steps, latest, self._until))
        elif "offset" in message:
            part = self._own_part(int(message["number"]), int(message["rank"]), int(message["offset"]))
            self._peers.look({"part": part})
        else:
            self._peers.look({"rows": self._own_rows(int(message["number"]))})

    def _hear(self, node: int, message: Json) -> None:
        if "rows" in message:
            self._rows[node] = [row for row in message["rows"] if {"rank", "state", "number"} <= row.keys()]
        elif "part" in message:
            part = dict(message["part"])
            self._parts[int(part["rank"])] = time.monotonic(), part
            self._asked_parts.pop(node, None)

    def _ask_own(self, request: ProfileRequest) -> None:
        for worker in self._workers:
            worker.diagnostics.ask_for_profile(request)

    def _note_reader(self, number: int) -> None:
        if number == self._number:
            self._read = time.monotonic()

    def _known_rows(self) -> list[Json]:
        return [*self._own_rows(self._number), *(row for rows in self._rows.values() for row in rows)]

    def _reports(self, number: int) -> Json:
        self._note_reader(number)
        if number == self._number and (now := time.monotonic()) >= self._next_question:
            self._next_question = now + _ASK_INTERVAL
            ended = {node for node, rows in self._rows.items() if rows and all(row["state"] in _ENDED for row in rows)}
            self._peers.look({"number": number}, set(range(self._ranks.nnodes)) - ended)
        known = {0: self._own_rows(number), **self._rows}
        rows = [row | {"node": node} for node, given in known.items() for row in given if row["number"] == number]
        missing = sorted(set(range(self._ranks.nnodes)) - {row["node"] for row in rows})
        return {
            "number": number, "worldSize": self._ranks.world_size, "missingNodes": missing,
            "omittedRanks": max(0, len(rows) - MOST_RANKS), "ranks": rows[:MOST_RANKS],
        }  # fmt: skip

    def _own_rows(self, number: int) -> list[Json]:
        return [self._row(worker, number) for worker in self._workers] if number == self._number else []

    def _row(self, worker: WorkerProcess, number: int) -> Json:
        """Return what a rank says. It says nothing before it has made a step."""
        if self._is_void:
            return {"state": "ended", "number": number, "rank": worker.rank}
        said = worker.diagnostics.profile_report()
        row = {"state": "asked", "number": number} | (said if said.get("number") == number else {})
        if worker.status is not None and row["state"] != "done":
            row["state"] = "ended"
        return row | {"rank": worker.rank}

    def _part(self, number: int, rank: int, offset: int) -> Json:
        node, now = rank // self._ranks.nproc_per_node, time.monotonic()
        self._note_reader(number)
        if now >= self._next_keep:
            self._next_keep = now + _KEEP_INTERVAL
            self._peers.look({"keep": number})  # a client reads one rank after another
        if node == 0:
            return self._own_part(number, rank, offset)
        _, found = self._parts.pop(rank, (0.0, {}))
        if (found.get("number"), found.get("offset")) == (number, offset):
            return found
        if now >= self._asked_parts.get(node, 0.0):  # a node has one answer of this length on its way
            self._asked_parts[node] = now + _PART_SECONDS
            self._peers.look({"number": number, "rank": rank, "offset": offset}, {node})
        return {"number": number, "rank": rank, "offset": offset}

    def _own_part(self, number: int, rank: int, offset: int) -> Json:
        self._note_reader(number)
        worker = next((each for each in self._workers if each.rank == rank), None)
        said = worker.diagnostics.profile_report() if worker else {}
        part = {"number": number, "rank": rank, "offset": offset, "data": ""}
        left = said.get("bytes", 0) - offset if said.get("number") == number else 0
        if worker and left > 0:
            data = worker.diagnostics.profile_part(offset, min(_PART, left))
            part["data"] = base64.b64encode(data).decode()
        return part


def _refusal(*parts: str) -> Answer:
    """Return the answer to a request that is not carried out. parts: what is wrong, why, what to do."""
    return b"200 OK", {"refused": parts}
