"""``--on-divergence restart``: ranks whose parameters differ go back to a save at which all agreed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints, Saved, newest_valid
from ddprun.launcher.divergence import go_back
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
    time.sleep(0.005)
"""


def diverged(server: ForkServer, folder: Path, mistake: str = "bit", **env: object) -> list[Run]:
    """Plant the mistake when a save is there and all parameters were compared since. Returns the launchers."""
    (folder / "train.py").write_text(SCRIPT)
    given = {"DDPJOB_CHECKPOINT_DIR": folder / "saved", "DDPJOB_ON_DIVERGENCE": "restart", **env}
    argv = folder / "train.py", folder / "go", folder / "plant", mistake
    runs = two_nodes(server, *argv, ranks=2, env=given)

    wait_until(lambda: (answer(runs[0], "progress").get("agreedStep") or 0) >= 40, "all parameters to be equal")
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
    assert 40 <= begun[-1] == away[0] - 20, (begun, away)
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


@pytest.mark.parametrize(("since", "left"), [(2.0, [1, 2]), (0.5, [1, 2, 3])])
def test_the_last_saves_stay_if_none_is_from_before(tmp_path: Path, since: float, left: list[int]) -> None:
    writer = Checkpoints(tmp_path, keep=9)
    run = writer.claim({})
    for step in (1, 2, 3):
        writer.save(step, b"state", {"time": float(step)})
    assert go_back(tmp_path, run, since)["isLeft"] is (left == [1, 2])
    newest: tuple[Saved, bytes] | None = newest_valid(tmp_path, lambda path, reason: pytest.fail(f"{path}: {reason}"))
    assert newest is not None and newest[0].step == left[-1]
