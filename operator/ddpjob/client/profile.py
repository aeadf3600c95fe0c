"""A profile of some steps of all ranks: asked for, fetched from the launcher of node 0, and merged into one file."""

import base64
import contextlib
import errno
import gzip
import json
import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from pydantic import ConfigDict, Field

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.client.ranks import OfAllRanks, expected, parsed_answer
from ddpjob.client.stacks import Ask
from ddpjob.client.trace import RankTrace, Spans, Wait, clock_offset, waits
from ddpjob.errors import DDPJobError, UnavailableError

_INTERVAL, _PART_INTERVAL, _SLOWEST = 0.5, 0.05, 30.0  # seconds between questions, for a part; until it has come
_LATE = 15.0  # seconds after the end of the profile in which the ranks write their traces
_LONGEST_TRACE, _LONGEST_FILE = 128 * 2**20, 2**30  # bytes of JSON, of a rank and in all
_MOST_VALUES = 8 * 2**20  # in the JSON of a rank: each takes some 70 bytes of memory
_LONGEST_PACKED = 33 * 2**20  # bytes
_AT_ONCE = 6  # ranks whose traces are fetched at once, and kept, at most 32 MiB of each
_PAUSES = (0.5, 2.0)  # seconds until a question is asked again
_ENDED = ("done", "failed", "ended")


class RankProfile(WireModel):
    """One rank in a profile."""

    model_config = ConfigDict(allow_inf_nan=False)

    rank: int
    """Global rank."""
    node: int
    """node_rank of its node."""
    state: str
    """done; failed; ended: the process; or what it did last: asked, waits, profiles, writes."""
    first: int = 0
    """Number of the first profiled step."""
    steps: int = 0
    """Number of profiled steps."""
    error: str = ""
    """Why there is no trace of this rank."""
    step_seconds: float | None = None
    """Time of a step, in the mean."""
    wait_seconds: float | None = None
    """Of that, the wait in collectives until the last rank has begun them."""
    data_seconds: float | None = None
    """Of that, the time in a DataLoader."""
    waits_for: int | None = None
    """The rank for which it waits longest."""


class Profile(OfAllRanks):
    """Some steps of all ranks of a job."""

    file: str
    """The Chrome trace, for https://ui.perfetto.dev and chrome://tracing; the number of a process is its rank."""
    omitted_ranks: int = 0
    """Ranks that are left out because there are too many."""
    is_cut: bool = False
    """Events of the last ranks are left out of the file, because it has its greatest length."""
    clock_offsets: dict[int, float] = Field(default_factory=dict)
    """By node_rank: seconds that were added to its clock."""
    not_aligned: list[int] = Field(default_factory=list)
    """node_ranks without waits, with their own clocks: no collective is common to them and to the first rank."""
    has_unknown_groups: bool = False
    """Waits in gloo are left out: there are several process groups, and PyTorch does not say which one waits."""
    ranks: list[RankProfile]
    """By rank."""
    waits: list[Wait]
    """The longest waits, the longest first."""


def take_profile(
    head: Json, ask: Ask, steps: int, to: Path, *, timeout: float, on_progress: Callable[[str], None] | None
) -> Profile:
    """Profile, write the trace, and return what it says.

    Args:
        head: the fields of the profile that are known of the job.
    """
    say, job = on_progress or (lambda _: None), str(head["job"])
    with _written(to) as file:
        with expected(job):
            number = int(parsed_answer(job, ask("POST", f"profile/{int(steps)}/{int(timeout)}"))["number"])
        ask = _patient(ask)
        reports, known = _reports(job, ask, number, timeout, say)
        merged = _Merged({row.rank: row for row in reports})
        if not any(row.state == "done" for row in reports):
            raise _no_trace(job, reports, timeout)
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for row, packed in _packed_traces(job, ask, number, [row for row in reports if row.state == "done"]):
            say(f"reads the trace of rank {row.rank}")
            merged.add(row, packed, file)
        file.write("\n]}\n")
    return merged.profile(head | known | {"file": str(to)})


@contextlib.contextmanager
def _written(to: Path) -> Iterator[IO[str]]:
    """Open the file that becomes ``to`` at the end; raise ``DDPJobError`` before the ranks are asked if it cannot."""
    try:
        if to.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = to.with_name(f".{to.name}.part")
        try:
            with gzip.open(partial, "wt", compresslevel=5) as file:
                yield file
            partial.replace(to)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DDPJobError(f"{to} cannot be written: {error.strerror}", "", "name another file with --to") from error


def _patient(ask: Ask) -> Ask:
    """Return what asks again if an answer is lost, which one of many may be on the way through an API server."""

    def asked(method: str, path: str) -> bytes:
        for pause in _PAUSES:
            try:
                return ask(method, path)
            except UnavailableError:
                time.sleep(pause)
        return ask(method, path)

    return asked


def _reports(
    job: str, ask: Ask, number: int, timeout: float, say: Callable[[str], None]
) -> tuple[list[RankProfile], Json]:
    """Return what the ranks say when all have ended the profile, or at the end of the time; and how many they are."""
    end = time.monotonic() + timeout + _LATE
    while True:
        answer = parsed_answer(job, ask("GET", f"profile/{number}"))
        with expected(job):
            rows = sorted((RankProfile.model_validate(row) for row in answer["ranks"]), key=lambda row: row.rank)
            size, omitted = int(answer["worldSize"]), int(answer.get("omittedRanks", 0))
        if sum(row.state in _ENDED for row in rows) + omitted == size or time.monotonic() >= end:
            return rows, {"world_size": size, "omitted_ranks": omitted}
        states = Counter(row.state for row in rows)
        say(", ".join(f"{count} of {size} ranks: {state}" for state, count in states.items()))
        time.sleep(_INTERVAL)


def _no_trace(job: str, rows: list[RankProfile], timeout: float) -> UnavailableError:
    if failed := next((row for row in rows if row.error), None):
        return UnavailableError(
            f"no rank of {job} has given a trace; rank {failed.rank}: {failed.error}",
            "the profiler of PyTorch does not work in the ranks as the error says",
            f"ddpjob logs {job} --node {failed.node}",
        )
    return UnavailableError(
        f"no rank of {job} has ended a step in {timeout:g} s",
        "the ranks hang, have ended, have longer steps, or have no optimizer of torch.optim that makes them",
        f"ddpjob stacks {job} shows what they do; --timeout gives longer steps more time",
    )


def _packed_traces(job: str, ask: Ask, number: int, rows: Sequence[RankProfile]) -> Iterator[tuple[RankProfile, bytes]]:
    """Yield the rows with their traces, as the ranks have packed them; a node after the other sends those of a rank."""
    local, of_node = Counter[int](), dict[int, int]()
    for row in rows:
        of_node[row.rank] = local[row.node]
        local[row.node] += 1
    left = deque(sorted(rows, key=lambda row: (of_node[row.rank], row.node)))
    fetched: deque[tuple[RankProfile, Future[bytes]]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            while left or fetched:
                while left and len(fetched) < _AT_ONCE:
                    row = left.popleft()
                    fetched.append((row, pool.submit(_fetched, job, ask, number, row)))
                row, future = fetched.popleft()
                yield row, future.result()
        finally:
            for _, future in fetched:
                future.cancel()


def _fetched(job: str, ask: Ask, number: int, row: RankProfile) -> bytes:
    """Return what there is of a rank's trace; one that has gone is empty, and one that is too long is cut."""
    content, end = bytearray(), time.monotonic() + _SLOWEST
    while time.monotonic() < end and len(content) <= _LONGEST_PACKED:
        part = parsed_answer(job, ask("GET", f"profile/{number}/{row.rank}/{len(content)}"))
        if "data" not in part:
            time.sleep(_PART_INTERVAL)
            continue
        with contextlib.suppress(ValueError, TypeError):
            if data := base64.b64decode(part["data"]):
                content += data
                end = time.monotonic() + _SLOWEST
                continue
        break
    return bytes(content)


def _unpacked(packed: bytes) -> Json:
    """Return the trace. Raises many errors if it is damaged, or needs too much memory."""
    unpack = zlib.decompressobj(wbits=31)
    content = unpack.decompress(packed, _LONGEST_TRACE)
    if not unpack.eof or content.count(b",") > _MOST_VALUES:
        raise ValueError("the trace is not whole, or too long")
    return dict(json.loads(content))


class _Merged:
    """The traces that were read until now, without their events: these are in the file."""

    def __init__(self, rows: dict[int, RankProfile]) -> None:
        self._rows = rows
        self._first: RankTrace | None = None
        self._offsets: dict[int, float] = {}  # by node, in microseconds
        self._not_aligned: set[int] = set()
        self._collectives: dict[int, Spans] = {}
        self._left_out = False
        self._written, self._is_cut = 0, False

    def add(self, row: RankProfile, packed: bytes, file: IO[str]) -> None:
        """Write the events of a rank."""
        try:
            trace = RankTrace.of(row.rank, row.node, row.first, _unpacked(packed))
            self._add(row, trace, file)
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError, zlib.error):
            self._rows[row.rank] = row.model_copy(update={"state": "failed", "error": "its trace cannot be read"})

    def _add(self, row: RankProfile, trace: RankTrace, file: IO[str]) -> None:
        first = self._first = self._first or trace
        if row.node not in self._offsets:
            found = clock_offset(first.collectives, trace.collectives) if row.node != first.node else 0.0
            self._offsets[row.node] = found or 0.0
            if found is None:
                self._not_aligned.add(row.node)
        self._left_out |= trace.left_out
        offset = self._offsets[row.node]
        spans = trace.collectives.items()
        self._collectives[row.rank] = {key: (begin + offset, end + offset) for key, (begin, end) in spans}
        if trace.steps:
            count = len(trace.steps)
            length = (trace.steps[-1][1] - trace.steps[0][0]) / count / 1e6
            known = {"step_seconds": length, "data_seconds": trace.data / count / 1e6, "steps": count}
            self._rows[row.rank] = row.model_copy(update=known)
        self._write(trace.shown(first.base, offset), file)

    def _write(self, events: Iterator[Json], file: IO[str]) -> None:
        for event in events:
            text = json.dumps(event)
            if self._written + len(text) > _LONGEST_FILE:
                self._is_cut = True
                return
            file.write((",\n" if self._written else "") + text)
            self._written += len(text)

    def _comparable(self) -> dict[int, Spans]:
        """Return the collectives of known groups, of the ranks whose clocks are aligned."""
        aligned = {
            rank: each for rank, each in self._collectives.items() if self._rows[rank].node not in self._not_aligned
        }
        if not self._left_out:
            return aligned
        # One rank is in several groups, so those without name of the others may be of several, too.
        named = {rank: {key: each[key] for key in each if key[1]} for rank, each in aligned.items()}
        return {rank: each for rank, each in named.items() if each}

    def profile(self, head: Json) -> Profile:
        """Return what all traces say."""
        known = self._comparable()
        found, seconds, blamed = waits(known)
        for rank, row in self._rows.items():
            if rank in known and row.steps:
                longest = max(blamed[rank].items(), key=lambda item: item[1], default=(None, 0.0))[0]
                told = {"wait_seconds": seconds[rank] / row.steps, "waits_for": longest}
                self._rows[rank] = row.model_copy(update=told)
        return Profile(
            **head, ranks=list(self._rows.values()), waits=found, is_cut=self._is_cut,
            has_unknown_groups=self._left_out,
            clock_offsets={node: offset / 1e6 for node, offset in self._offsets.items()},
            not_aligned=sorted(self._not_aligned),
        )  # fmt: skip
