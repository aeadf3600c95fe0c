"""Traces of two nodes whose clocks differ, on one clock; the waits of each rank; what a launcher may answer."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddpjob.client.profile import Profile, take_profile
from ddpjob.client.trace import RankTrace, clock_offset, waits
from ddpjob.errors import DDPJobError, UnavailableError
from tests.install.generate import schema_file
from tests.json_schema import faults

HEAD = {"job": "mnist", "namespace": "default", "place": "here", "attempt": 1}
SECOND = 1e6  # microseconds
SKEW = 2.5 * SECOND


def content(begins: list[float], *, skew: float = 0.0, ends: list[float] | None = None) -> dict[str, Any]:
    """Return the trace of a rank whose steps take 1 s and end with an all_reduce, which ends 10 ms before the step."""
    ends = ends or [step + 0.99 for step in range(len(begins))]

    def event(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
        at = {"ts": begin * SECOND + skew, "dur": (end - begin) * SECOND}
        return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 4711, "tid": 1, **at, **more}

    events = [event(f"ProfilerStep#{step + 1}", step, step + 1) for step in range(len(begins))]
    events += [event("gloo:all_reduce", begin, end) for begin, end in zip(begins, ends, strict=True)]
    events += [event("nccl:all_reduce", 0.0, 0.1), event("enumerate(DataLoader)#next", 0.0, 0.25)]
    events += [{"ph": "s", "id": 7, "name": "ac2g", "pid": 4711, "tid": 1, "ts": skew}]
    events += [event("PyTorch Profiler (0)", 0, 9, pid="Spans"), {"ph": "M", "name": "process_name", "pid": 4711}]
    return {"baseTimeNanoseconds": 10**18, "traceEvents": events}


def test_clocks_are_aligned_by_the_ends_of_collectives_and_a_wait_lasts_until_the_last_rank_begins() -> None:
    quick = RankTrace.of(0, 0, 12, content([0.2, 1.2, 2.9]))
    late = RankTrace.of(1, 1, 12, content([0.7, 1.1, 2.7], skew=SKEW, ends=[0.99, 1.99, 2.991]))
    offset = clock_offset(quick.collectives, late.collectives)
    assert offset == pytest.approx(-SKEW)
    moved = {key: (begin + SKEW * -1, end - SKEW) for key, (begin, end) in late.collectives.items()}
    found = [(w.rank, round(w.seconds, 3), w.step, w.for_rank) for w in waits({0: quick.collectives, 1: moved})[0]]
    assert found == [(0, 0.5, 12, 1), (1, 0.2, 14, 0), (1, 0.1, 13, 0)]


def test_a_rank_that_waits_in_two_collectives_at_once_waits_once() -> None:
    begins = [(0.0, 2.0), (1.0, 1.5), (1.5, 2.5), (9.0, 9.25)]
    late = {(1, "", "all_reduce", n): (until * SECOND, 10 * SECOND) for n, (_, until) in enumerate(begins)}
    quick = {(1, "", "all_reduce", n): (begin * SECOND, 10 * SECOND) for n, (begin, _) in enumerate(begins)}
    assert waits({0: quick, 1: late})[1] == {0: 2.75, 1: 0.0}


def test_a_rank_that_began_a_step_later_is_compared_by_the_numbers_of_its_steps() -> None:
    first = RankTrace.of(0, 0, 12, content([0.2, 1.2, 2.2]))
    later = RankTrace.of(1, 1, 13, content([0.5, 1.5], skew=SKEW + SECOND))
    assert clock_offset(first.collectives, later.collectives) == pytest.approx(-SKEW)
    assert clock_offset(first.collectives, RankTrace.of(2, 1, 90, content([0.1])).collectives) is None


def test_work_of_a_gpu_belongs_to_the_step_that_has_launched_it() -> None:
    trace = content([])
    trace["traceEvents"] += [
        {"ph": "X", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": step * SECOND, "dur": SECOND}
        for step in (1, 2)
    ]
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "pid": 0, "tid": 7}
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1.9 * SECOND, "dur": 1}
        | {"args": {"correlation": 5}},
        kernel | {"ts": 2.1 * SECOND, "dur": 0.5 * SECOND, "args": {"correlation": 5}},
    ]
    assert list(RankTrace.of(0, 0, 3, trace).collectives) == [(3, "", "ncclDevKernel_AllReduce_Sum_f32", 1)]


def of_groups(begin: float, *groups: str, kernels: bool) -> dict[str, Any]:
    """Return the trace of a rank in the process groups of all ranks and of these, which reduces in each of these."""
    trace = content([begin])
    if kernels:
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event["name"] != "gloo:all_reduce"]
    trace["distributedInfo"] = {"pg_config": [{"ranks": json.loads(each)} for each in ("[0, 1, 2, 3]", *groups)]}
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7, "dur": 0.1 * SECOND}
    if kernels:
        trace["traceEvents"] += [
            kernel | {"ts": begin * SECOND, "args": {"Process Group Name": "1", "Process Group Ranks": each}}
            for each in groups
        ]
    return trace


@pytest.mark.parametrize("kernels", [True, False])
def test_collectives_are_compared_within_a_process_group_and_left_out_if_it_is_not_known(
    kernels: bool, tmp_path: Path
) -> None:
    begins = [(0.1, "[0, 1]"), (0.2, "[0, 1]"), (0.15, "[2, 3]"), (0.18, "[2, 3]")]
    traces = [packed(of_groups(begin, group, kernels=kernels)) for begin, group in begins]
    found = profiled(Launcher(dict(enumerate(traces)), node=0), tmp_path / "t.gz")
    pairs = [(wait.rank, round(wait.seconds, 3), wait.for_rank) for wait in found.waits]
    assert pairs == ([(0, 0.1, 1), (2, 0.03, 3)] if kernels else [])
    assert [rank.waits_for for rank in found.ranks] == ([1, None, 3, None] if kernels else [None] * 4)
    assert [rank.wait_seconds is None for rank in found.ranks] == [not kernels] * 4
    assert found.has_unknown_groups == (not kernels)
    assert not list(faults(json.loads(json.dumps(found.wire())), json.loads(schema_file("profile").read_text())))


def test_a_rank_without_groups_of_its_own_is_not_compared_with_ranks_that_have_them(tmp_path: Path) -> None:
    traces = [of_groups(0.1, kernels=False), of_groups(0.3, kernels=False), of_groups(0.5, "[2, 3]", kernels=False)]
    found = profiled(Launcher(dict(enumerate(map(packed, traces)))), tmp_path / "t.gz")
    assert (found.waits, found.has_unknown_groups, found.not_aligned) == ([], True, [2])
    found = profiled(Launcher(dict(enumerate(map(packed, traces[:2])))), tmp_path / "t.gz")
    assert ([(wait.rank, wait.for_rank) for wait in found.waits], found.has_unknown_groups) == ([(0, 1)], False)


def test_ranks_of_nodes_whose_clocks_are_not_aligned_are_not_compared(tmp_path: Path) -> None:
    traces = [of_groups(0.1, "[0, 1]", kernels=True), *(of_groups(at, "[2, 3]", kernels=True) for at in (0.2, 0.25))]
    found = profiled(Launcher(dict(enumerate(map(packed, traces)))), tmp_path / "t.gz")
    assert (found.waits, found.not_aligned) == ([], [1, 2])
    assert [rank.wait_seconds for rank in found.ranks] == [0.0, None, None]


class Launcher:
    """Answers as the launcher of node 0. traces: by rank, as compressed bytes."""

    def __init__(self, traces: dict[int, bytes], state: str = "done", **said: Any) -> None:
        self.traces, self.asked, self.part, self.begun = traces, Counter[int](), 200, 0
        self.rows = [
            {"rank": rank, "node": rank, "number": 3, "state": state, "first": 12, "steps": 3, **said}
            for rank in traces
        ]

    def __call__(self, method: str, path: str) -> bytes:
        words = path.split("/")
        answer: dict[str, Any] = {"worldSize": len(self.traces), "ranks": self.rows}
        if method == "POST":
            self.begun += 1
            answer = {"number": 3}
        elif len(words) == 4:
            rank, offset = int(words[2]), int(words[3])
            asked = self.asked[rank] = self.asked[rank] + 1
            if asked == 3:
                raise UnavailableError("the way to the launcher is gone for a moment")
            data = base64.b64encode(self.traces[rank][offset : offset + self.part]).decode()
            answer = {} if asked % 2 else {"data": data}  # its node has not sent it yet
        return json.dumps(answer).encode()


def packed(trace: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps(trace).encode())


def profiled(launcher: Launcher, to: Path) -> Profile:
    return take_profile(HEAD, launcher, 3, to, timeout=0, on_progress=None)


def test_the_file_has_the_ranks_as_processes_on_one_clock(tmp_path: Path) -> None:
    to = tmp_path / "trace.json.gz"
    damaged = packed(content([0.5]))[:-20]
    traces = [packed(content([0.2, 1.2, 2.2])), packed(content([0.7, 1.7, 2.7], skew=SKEW)), damaged]
    found = profiled(Launcher(dict(enumerate(traces))), to)
    assert [(rank.rank, rank.state, rank.error) for rank in found.ranks] == [
        (0, "done", ""), (1, "done", ""), (2, "failed", "its trace cannot be read"),
    ]  # fmt: skip
    assert (found.clock_offsets, found.not_aligned) == ({0: 0.0, 1: -2.5}, [])
    assert not list(faults(json.loads(json.dumps(found.wire())), json.loads(schema_file("profile").read_text())))
    first = found.ranks[0]
    assert (first.waits_for, first.step_seconds, first.data_seconds) == (1, 1.0, pytest.approx(0.25 / 3))
    assert first.wait_seconds == pytest.approx(0.5) and found.ranks[1].wait_seconds == 0
    events = json.loads(gzip.decompress(to.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    ends = [event["ts"] + event["dur"] for event in events if event["name"] == "gloo:all_reduce"]
    assert ends[:3] == pytest.approx(ends[3:]) and {event["id"] for event in events if "id" in event} == {"0.7", "1.7"}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0 (node 0)", "rank 1 (node 1)",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == [to.name]


@pytest.mark.parametrize(
    ("state", "said", "message"),
    [
        ("failed", {"error": "RuntimeError: no"}, "no rank of mnist has given a trace; rank 0: RuntimeError: no"),
        ("asked", {}, "no rank of mnist has ended a step in 0 s"),
        ("ended", {}, "no rank of mnist has ended a step in 0 s"),
    ],
)
def test_why_there_is_no_trace_is_said(
    tmp_path: Path, state: str, said: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.client.profile._LATE", 0.1)
    with pytest.raises(UnavailableError, match=message):
        profiled(Launcher({0: b""}, state, **said), tmp_path / "trace.json.gz")
    assert not list(tmp_path.iterdir())


def test_an_answer_that_is_no_look_inside_is_refused(tmp_path: Path) -> None:
    for answer in (b"[]", b"{", b"[" * 200_000, b'{"number": "x"}', b"{}"):
        with pytest.raises(UnavailableError, match="something else than ranks"):
            take_profile(HEAD, lambda *_, a=answer: a, 5, tmp_path / "t", timeout=0, on_progress=None)  # type: ignore[misc]


def test_a_hostile_trace_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 1, "name": "x", "dur": 1}
    steps = [{"ph": "X", "pid": 1, "tid": 1, "name": "ProfilerStep#1", "ts": 1, "dur": 10**400}]
    hostile = [
        b"[" * 200_000,
        b'{"traceEvents": [' + b"{}," * 9_000_000 + b"{}]}",
        json.dumps({"baseTimeNanoseconds": 10**400, "traceEvents": [event | {"ts": 1}]}).encode(),
        b'{"traceEvents": {"a": 1}, "baseTimeNanoseconds": "' + b"9" * 5000 + b'"}',
        b'{"traceEvents": 1}',
    ]
    harmless = json.dumps(
        {"traceEvents": [event | {"ts": 10**400}, event | {"ts": 5, "id": "x" * 99}, *steps]}
    ).encode()
    launcher = Launcher(dict(enumerate(gzip.compress(text, 1) for text in (*hostile, harmless))))
    launcher.part = 2**20
    found = profiled(launcher, tmp_path / "t.gz")
    assert [(rank.state, rank.error) for rank in found.ranks[:-1]] == [("failed", "its trace cannot be read")] * 5
    assert found.ranks[-1].state == "done"
    events = json.loads(gzip.decompress((tmp_path / "t.gz").read_bytes()))["traceEvents"]
    assert [event["ts"] for event in events if event["name"] == "x"] == [5.0]


def test_a_file_that_cannot_be_written_is_refused_before_the_ranks_are_profiled(tmp_path: Path) -> None:
    launcher = Launcher({0: packed(content([0.5]))})
    for to in (Path("/"), Path(), tmp_path, tmp_path / "missing" / "t.gz"):
        with pytest.raises(DDPJobError, match="cannot be written"):
            profiled(launcher, to)
    assert launcher.begun == 0 and not list(tmp_path.iterdir())
