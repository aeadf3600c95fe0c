"""`ddpjob top`: what is abnormal among the ranks, and the ranks of a job of this machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.table import Table

from ddpjob.cli.card import facts_of
from ddpjob.cli.top import headline, ranks_table
from ddpjob.client.job import DDPJob
from ddpjob.client.ranks import RankState, RankTable, rank_table
from ddpjob.errors import UnavailableError
from tests.cli.program import Program, shell_job


def a_rank(rank: int, **fields: Any) -> RankState:
    usual = {"node": rank // 2, "step": 100, "phase": "train", "collective": "", "age_seconds": 0.1}
    return RankState(rank=rank, **usual | {"step_seconds": 0.2, "memory_bytes": 2**30} | fields)


def a_table(ranks: list[RankState], **fields: Any) -> RankTable:
    usual = {"job": "big", "namespace": "default", "place": "here", "attempt": 1, "world_size": len(ranks)}
    return RankTable(ranks=ranks, **usual | fields)


def texts(shown: Table) -> list[list[str]]:
    """Return the rows; what is abnormal is in brackets."""
    columns = [[f"[{c}]" if c.style == "red" else str(c) for c in column._cells] for column in shown.columns]  # type: ignore[union-attr]
    return [list(row) for row in zip(*columns, strict=True)]


def test_the_slow_the_waiting_and_the_silent_rank_are_abnormal() -> None:
    ranks = [
        a_rank(0, collective="all_reduce"),
        a_rank(1, step_seconds=0.5, data_wait_seconds=0.4),
        a_rank(2, age_seconds=30.0),
        a_rank(3, step=90, data_wait_seconds=0.002),
        a_rank(4, step_seconds=None, step=0, phase="start", memory_bytes=None, age_seconds=10.0),
    ]
    assert texts(ranks_table(a_table(ranks))) == [
        ["n0r0", "100", "200.0 ms", "×1.00", "-", "1.00 GiB", "0s ago", "waits in all_reduce"],
        ["n0r1", "100", "[500.0 ms]", "[×2.50]", "[400.0 ms (80%)]", "1.00 GiB", "0s ago", "train"],
        ["n1r2", "100", "200.0 ms", "×1.00", "-", "1.00 GiB", "[30s ago]", "train"],
        ["n1r3", "[90]", "200.0 ms", "×1.00", "2.0 ms (1%)", "1.00 GiB", "0s ago", "train"],
        ["n2r4", "[0]", "-", "-", "-", "-", "10s ago", "start"],
    ]


@pytest.mark.parametrize("field", ['"ageSeconds": NaN', '"stepSeconds": 1e999', f'"memoryBytes": 1{"0" * 400}'])
def test_an_answer_with_a_number_that_is_none_is_refused(field: str) -> None:
    row = '{"rank": 0, "node": 0, "step": 1, "phase": "train", "collective": "", "ageSeconds": 1.5, ' + field + "}"
    job = DDPJob.from_manifest(
        {"metadata": {"name": "tiny", "namespace": "default"}, "spec": {}, "status": {"attempt": 1}}
    )
    for answer in (f'{{"worldSize": 1, "ranks": [{row}]}}', "[]", "{", "[" * 200_000):
        with pytest.raises(UnavailableError, match="something else than ranks"):
            rank_table(job, "this machine", answer.encode())


def test_a_row_that_is_older_than_the_others_is_not_behind() -> None:
    rows = texts(ranks_table(a_table([a_rank(0), a_rank(1, step=92, age_seconds=1.7)])))
    assert [row[1] for row in rows] == ["100", "92"]


def test_the_rank_of_a_hang_is_abnormal_and_named_as_in_the_card() -> None:
    stall = {"rank": 1, "step": 100, "where": "train.py:9"}
    job = DDPJob.from_manifest(
        {"metadata": {"name": "big", "namespace": "default"}, "spec": {}, "status": {"attempt": 1, "stall": stall}}
    )
    answer = {"worldSize": 2, "ranks": [a_rank(rank).wire() for rank in range(2)]}
    seen = rank_table(job, "here", json.dumps(answer).encode())
    assert [row[0] for row in texts(ranks_table(seen))] == ["n0r0", "[n0r1]"]
    text = "the others wait for rank 1, step 100 at train.py:9"
    assert [fact.text for fact in facts_of(job, datetime.now(UTC))] == [text]
    assert seen.wire()["stall"] == stall


def test_the_parts_of_a_step_are_columns_and_the_part_of_the_slow_rank_is_abnormal() -> None:
    usual = dict.fromkeys(("data", "forward", "communication", "optimizer", "script", "collection"), 0.001)
    usual |= {"backward": 0.002, "wait": 0.02, "throttled": 0.0, "queue": 0.0}
    slow = {"since": "2026-01-01T00:00:00Z", "rank": 1, "part": "backward", "seconds": "0.019", "stepSeconds": "0.2"}
    job = DDPJob.from_manifest(
        {"metadata": {"name": "big", "namespace": "default"}, "spec": {}, "status": {"attempt": 1, "slow": slow}}
    )
    ranks = [
        a_rank(0, parts=usual),
        a_rank(1, parts=usual | {"backward": 0.021, "wait": 0.001}),
        a_rank(2),
    ]
    seen = rank_table(job, "here", json.dumps({"worldSize": 3, "ranks": [rank.wire() for rank in ranks]}).encode())
    rows = texts(ranks_table(seen))
    assert [row[0] for row in rows] == ["n0r0", "[n0r1]", "n1r2"]
    assert [row[5:11] for row in rows] == [
        ["1.0 ms", "2.0 ms", "1.0 ms", "1.0 ms", "1.0 ms", "20.0 ms"],
        ["1.0 ms", "[21.0 ms]", "1.0 ms", "1.0 ms", "1.0 ms", "1.0 ms"],
        ["-"] * 6,
    ]
    text = "the others wait 0.019 s of each step of 0.2 s for rank 1: backward"
    assert [fact.text for fact in facts_of(job, datetime.now(UTC))] == [text]


def test_the_headline_names_what_is_missing() -> None:
    ranks = [a_rank(0), a_rank(1, step=99, step_seconds=0.3), a_rank(2, step_seconds=1.5)]
    seen = a_table(ranks, attempt=2, world_size=8, missing_nodes=[1, 3], omitted_ranks=1)
    assert headline(seen) == (
        "big attempt 2, 3 of 8 ranks, steps 99 to 100, median 300.0 ms a step, nothing is known of node 1, 3, "
        "1 ranks are left out (here)"
    )


def test_what_torchrun_lacks_is_said_in_three_lines(ddpjob: Program) -> None:
    (ddpjob.folder / "torchrun").write_text("#!/bin/sh\necho up; exec sleep 600\n")
    (ddpjob.folder / "torchrun").chmod(0o755)
    job = shell_job("plain", "")
    job["spec"]["command"] = [str(ddpjob.folder / "torchrun"), "train.py"]
    with ddpjob.started("run", ddpjob.write(job), "-o", "json"):
        ddpjob.until_log("plain", "up")
        for verb in ("top", "stacks", "profile"):
            done = ddpjob(verb, "plain")
            lines = done.err.splitlines()
            assert done.code == 1 and [line[:7] for line in lines] == ["error: ", "hint:  ", "next:  "]
            assert "runs under torchrun" in lines[0] and "launcher: Injected" in lines[2]
