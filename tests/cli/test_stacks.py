"""`ddpjob stacks` and `profile`: ranks that are at the same place are one row, and what is abnormal is seen."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob.cli import profile, stacks
from ddpjob.client.profile import Profile, RankProfile
from ddpjob.client.stacks import RankStacks, StackTable
from ddpjob.client.trace import Wait
from tests.cli.program import Program, shell_job
from tests.cli.test_top import texts
from tests.processes import eventually

USUAL: dict[str, Any] = {"job": "big", "namespace": "default", "place": "here", "attempt": 1}
SCRIPT = """
import os, time
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def rank(number: int, **fields: Any) -> RankStacks:
    usual: dict[str, Any] = {"step": 7, "phase": "train", "collective": "all_reduce", "quiet": 9.0, "stopped": False}
    return RankStacks(rank=number, node=number // 8, **usual | {"answered": True, "where": "train.py:50"} | fields)


def test_thirty_ranks_that_wait_are_one_row_and_those_that_do_not_are_marked() -> None:
    ranks = [rank(number) for number in range(32)]
    ranks[17] = rank(17, collective="", where="dataset.py:88", step=6)
    ranks[20] = rank(20, answered=False, stopped=True, where=None)
    ranks[21] = rank(21, answered=False, where=None)
    seen = StackTable(**USUAL, world_size=40, missing_nodes=[4], ranks=ranks)
    assert stacks.headline(seen) == (
        "big attempt 1, 32 of 40 ranks, no answer of node 4: 29 ranks: waits in all_reduce at train.py:50; rank 17: "
        "works in phase train at dataset.py:88; rank 20: is stopped; last, it waits in all_reduce; rank 21: does not "
        "answer; last, it waits in all_reduce (here)"
    )
    assert texts(stacks.groups_table(seen)) == [
        ["0-16, 18-19, 22-31", "waits in all_reduce", "train.py:50", "7", "9s ago"],
        ["[17]", "works in phase train", "dataset.py:88", "6", "9s ago"],
        ["[20]", "[is stopped; last, it waits in all_reduce]", "-", "7", "9s ago"],
        ["[21]", "[does not answer; last, it waits in all_reduce]", "-", "7", "9s ago"],
    ]


def test_the_stack_of_a_group_ends_at_the_line_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    frames = [
        f'  File "/x/{name}", line {line} in f' for name, line in (("os.py", 1), ("dataset.py", 88), ("run.py", 3))
    ]
    dump = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in g\n\nThread 0x2:\n' + "\n".join(frames)
    stacks.show_stack(rank(17, where="dataset.py:88", stacks=dump + "\x1b[2J"))
    assert capsys.readouterr().out.splitlines() == [
        "rank 17, most recent call first:", *frames[:2], "  … ddpjob stacks --rank 17 shows all threads",
    ]  # fmt: skip


def test_waits_of_a_tenth_of_a_step_and_missing_traces_are_abnormal() -> None:
    done = {"state": "done", "first": 12, "steps": 5, "step_seconds": 0.1}
    ranks = [
        RankProfile(rank=0, node=0, wait_seconds=0.03, waits_for=1, data_seconds=0.001, **done),
        RankProfile(rank=1, node=1, state="failed", error="OSError: no"),
    ]
    wait = Wait(rank=0, seconds=0.05, collective="gloo:all_reduce", step=13, for_rank=1)
    found = Profile(
        **USUAL,
        world_size=2,
        file="t.gz",
        clock_offsets={0: 0.0, 1: -0.0251},
        not_aligned=[3],
        has_unknown_groups=True,
        ranks=ranks,
        waits=[wait],
    )
    assert texts(profile.ranks_table(found)) == [
        ["n0r0", "12-16", "100.0 ms", "[30.0 ms (30%)]", "1", "1.0 ms (1%)", "done"],
        ["n1r1", "-", "-", "-", "-", "-", "[failed: OSError: no]"],
    ]
    assert profile.headline(found) == (
        "big attempt 1, traces of 1 of 2 ranks, clocks of 2 nodes aligned by up to 25.1 ms, "
        "not aligned: node 3, without the waits in gloo, because PyTorch does not say of which process group (here)"
    )
    alone = found.model_copy(update={"not_aligned": [1], "has_unknown_groups": False})
    assert profile.headline(alone) == "big attempt 1, traces of 1 of 2 ranks, not aligned: node 1 (here)"


def test_a_job_of_this_machine_is_looked_into_while_it_trains(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text(SCRIPT)
    job = shell_job("tiny", "exec ddprun train.py", numNodes=2, nprocPerNode=1)
    with ddpjob.started("run", ddpjob.write(job), "-o", "json"):
        done = eventually(
            "it makes steps", lambda: (d := ddpjob("profile", "tiny", "--steps", "2")).code == 0 and d, timeout=120
        )
        shown = ddpjob("stacks", "tiny").out
    assert shown.startswith("tiny attempt 1, 2 of 2 ranks: ") and "train.py:" in shown and "rank 0, most" in shown
    assert done.out.endswith("tiny-profile.json.gz: open it at https://ui.perfetto.dev; each process is a rank\n")
    assert (ddpjob.folder / "tiny-profile.json.gz").stat().st_size > 0
