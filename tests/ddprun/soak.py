"""Tests that take too long for every run; `make soak` runs them.

Each repeats, with more ranks, steps or samples, what a test in this folder checks in seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ddprun.resilience.test_in_place import TRAINING, TwoNodes, descriptors
from tests.ddptrain.runs import ForkServer, Run

LIVES = 250  # of four ranks: 1,000 forks
# Each rank has a file in /dev/shm with such a name as torch gives it, which nothing but its launcher deletes.
# The script reports its steps, which go on in the next life: otherwise each life needs more steps than any before it.
SHARING = TRAINING.replace(
    "    if rank == 0:",
    """
    if done == 1:
        import ddprun
        Path(f"/dev/shm/torch_{os.getpid()}_soak").write_bytes(bytes(1000))
    ddprun.report(step=step)
    if rank == 0:""",
)


def resident_bytes(run: Run) -> int:
    return int(Path(f"/proc/{run.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1800)
def test_250_lives_leave_nothing_behind_and_none_hangs(ddptrain: ForkServer, tmp_path: Path) -> None:
    nodes = TwoNodes(ddptrain, tmp_path, ranks=2, grant=LIVES, script=SHARING)
    step, before, ranks = nodes.trains(1)["step"], list[tuple[int, int]](), set[int]()
    for life in range(2, LIVES + 1):
        ranks |= {pid for run in nodes.runs for pid in run.ranks().values()}
        nodes.kill(life % 2, life // 2 % 2)
        step = nodes.trains(life, step)["step"]
        if life == 10:
            before = [(descriptors(run), resident_bytes(run)) for run in nodes.runs]
    for run, (opened, resident) in zip(nodes.runs, before, strict=True):
        assert descriptors(run) <= opened + 1  # a request for progress may have one
        assert resident_bytes(run) - resident <= 2 * 2**20
        assert len(run.ranks()) == 2, "no other child, also no zombie"
    nodes.finish()
    assert nodes.runs[0].message()["life"] == LIVES
    left = [path.name for path in Path("/dev/shm").glob("torch_*")]
    assert not [name for name in left if int(name.split("_")[1]) in ranks]
