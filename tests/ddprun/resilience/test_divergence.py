"""``--on-divergence restart``: ranks whose parameters differ go back to a save at which all agreed."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints, newest_valid
from ddprun.launcher.divergence import WentBack, go_back
from tests.ddprun.resilience.scripts import two_nodes
from tests.ddprun.resilience.test_rank_table import answer
from tests.ddptrain.runs import ForkServer, Run, wait_until

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import ddprun

dist.init_process_group("gloo")
rank, (go, plant, mistake) = dist.get_rank(), sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), 0.001)
checkpoints = ddprun.checkpoints(os.environ["DDPJOB_CHECKPOINT_DIR"], keep=10_000)
loaded = checkpoints.load_newest()
if loaded:
    model.load_state_dict(loaded.state)
step = loaded.step if loaded else 0
print(f"starts at step {step}", flush=True)
torch.manual_seed(rank)
seen, is_planted = torch.zeros(2), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
while not seen[0]:
    called = model if mistake == "bare module" and seen[1] else wrapped
    optimizer.zero_grad()
    called(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    if mistake == "bit" and seen[1] and not is_planted:
        is_planted = True
        if rank == 2:
            model[1].weight.detach().view(torch.int32)[1, 3] ^= 1 << 10
    step += 1
    if step % 20 == 0:
        checkpoints.save(step, model.state_dict())
    seen = torch.tensor([float(os.path.exists(each)) for each in (go, plant)])
    dist.all_reduce(seen)
    time.sleep(0.02)
"""


def diverged(server: ForkServer, folder: Path, mistake: str = "bit", **env: object) -> list[Run]:
    """Plant the mistake when a save is there and all parameters were compared since. Returns the launchers."""
    (folder / "train.py").write_text(SCRIPT)
    given = {"DDPJOB_CHECKPOINT_DIR": folder / "saved", "DDPJOB_ON_DIVERGENCE": "restart", **env}
    argv = folder / "train.py", folder / "go", folder / "plant", mistake
    runs = two_nodes(server, *argv, ranks=2, env=given)

    wait_until(lambda: answer(runs[0], "progress").get("checkpoint"), "a save")
    began = time.monotonic()  # the launcher looks at the saves once a second
    step = wait_until(
        lambda: time.monotonic() - began > 1.5 and answer(runs[0], "progress")["step"], "the launcher to see the save"
    )
    wait_until(lambda: (answer(runs[0], "progress").get("agreedStep") or 0) >= step, "all parameters to be equal since")
    (folder / "plant").touch()
    return runs


def saves(folder: Path, suffix: str) -> list[int]:
    names = [path.name for path in (folder / "saved").glob(f"run-*/step-*.json{suffix}")]
    return sorted(int(name.split(".")[0].removeprefix("step-")) for name in names)


def test_the_next_start_continues_from_a_save_at_which_all_agreed(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = diverged(ddptrain, tmp_path, DDPJOB_INPLACE_RESTARTS=2)
    wait_until(lambda: runs[0].output().count("starts at step") > 2, "the next life")
    begun = [int(line.rpartition(" ")[2]) for line in runs[0].output().splitlines() if "starts at step" in line]
    away = saves(tmp_path, ".diverged")
    assert 20 <= begun[-1] == away[0] - 20, (begun, away)
    good = answer(runs[0], "progress")["agreedCheckpoint"]
    assert (tmp_path / "saved" / good["path"]).exists(), "no save that was set aside"
    assert len(away) == len(range(away[0], away[-1] + 20, 20)), "each save since"
    (tmp_path / "go").touch()
    assert [run.wait() for run in runs] == [0, 0]
    said = runs[0].output()
    assert "restart in place 1 of 2: node 1: replicas diverged: 1.weight of rank 2 (node 1) differs" in said
    assert "set aside as *.diverged: step-" in said


def test_a_job_leaves_the_node_that_differs(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = diverged(ddptrain, tmp_path, DDPJOB_INPLACE_RESTARTS=2, DDPJOB_UID="uid", DDPJOB_ATTEMPT=1)
    assert [run.wait() for run in runs] == [77, 81]
    own, other = runs[1].message(), runs[0].message()
    assert (own["kind"], own["cause"], own["rank"]) == ("ReplicasDiverged", "own", 2)
    assert (other["cause"], other["root"]["node"], other["root"]["code"]) == ("peer", 1, 81)
    assert saves(tmp_path, ".diverged")


def test_a_mistake_of_the_script_is_the_failure_of_no_rank(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = diverged(ddptrain, tmp_path, "bare module")
    assert [run.wait() for run in runs] == [81, 77]
    own = runs[0].message()
    assert (own["kind"], own["cause"], own["rank"]) == ("ReplicasDiverged", "own", None)
    assert "calls the module without DistributedDataParallel" in own["message"]


def saved(root: Path, steps: range, **owner: object) -> int:
    """Save checkpoints as a life of this machine, or as ``owner`` says. Returns the number of the run."""
    writer = Checkpoints(root, keep=9)
    writer.prepare()
    run = writer.claim({"host": socket.gethostname(), "life": 2, "time": 100.0} | owner)
    for step in steps:
        writer.save(step, b"state", {"time": 0.0})
    return run


def newest(root: Path) -> tuple[int, int] | None:
    found = newest_valid(root, lambda path, reason: pytest.fail(f"{path}: {reason}"))
    return (found[0].run, found[0].step) if found else None


@pytest.mark.parametrize("below", ["", "model"])
@pytest.mark.parametrize(
    ("good", "left"),
    [({"run": 2, "step": 4}, (2, 4)), ({"run": 2, "step": 3}, (2, 3)), ({"run": 1, "step": 2}, (1, 2)), (None, (1, 2))],
)
def test_only_saves_of_this_life_are_set_aside(
    tmp_path: Path, below: str, good: dict[str, int] | None, left: tuple[int, int]
) -> None:
    saved(tmp_path / below, range(1, 3), host="another machine", time=10**10)
    saved(tmp_path / below, range(3, 6))
    assert not go_back(tmp_path, good, life=2, since=99.0).refused
    assert newest(tmp_path / below) == left


@pytest.mark.parametrize("owner", [{"life": 1}, {"time": 98.0}, {"host": "another machine"}])
def test_saves_of_others_are_not_touched(tmp_path: Path, owner: dict[str, object]) -> None:
    saved(tmp_path, range(1, 3), **owner)
    assert go_back(tmp_path, None, life=2, since=99.0) == WentBack(is_known=False), "nothing was saved in this life"
    assert newest(tmp_path) == (1, 2)


def test_nothing_is_set_aside_if_no_save_is_from_before(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 3))
    assert go_back(tmp_path, None, life=2, since=99.0).refused
    assert newest(tmp_path) == (1, 2)
    saved(tmp_path / "second", range(1, 3))
    refused = go_back(tmp_path, {"run": 1, "step": 1}, life=2, since=99.0).refused
    assert refused, "it is not known which directory is resumed from"
    assert newest(tmp_path) == (1, 2)
