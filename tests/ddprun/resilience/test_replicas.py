"""Two nodes whose ranks do not have the same parameters any more: what the port of node 0 and the log say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddprun.resilience.scripts import two_nodes
from tests.ddprun.resilience.test_rank_table import answer
from tests.ddptrain.runs import ForkServer, wait_until

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, go, plant, mistake = dist.get_rank(), *sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), 0.001)
torch.manual_seed(rank)
seen, is_planted = torch.zeros(2), False
while not seen[0]:
    called = model if mistake == "bare module" and seen[1] else wrapped
    optimizer.zero_grad()
    called(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    if mistake == "bit" and seen[1] and not is_planted and rank == 2:
        model[2].weight.detach().view(torch.int32)[1, 3] ^= 1 << 10
    is_planted = bool(seen[1])
    seen = torch.tensor([float(os.path.exists(each)) for each in (go, plant)])
    dist.all_reduce(seen)
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("bit", ("2.weight", "memory", 2, 1, "of rank 2 (node 1) differs from most others")),
        ("bare module", ("0.weight", "gradients", None, None, "differs between the ranks")),
    ],
)
def test_node_zero_names_the_tensor_that_differs_between_the_ranks(
    ddptrain: ForkServer, tmp_path: Path, mistake: str, expected: tuple[object, ...]
) -> None:
    script, go, plant = tmp_path / "train.py", tmp_path / "go", tmp_path / "plant"
    script.write_text(SCRIPT)
    runs = two_nodes(ddptrain, script, go, plant, mistake, ranks=2)
    agreed = wait_until(lambda: answer(runs[0], "progress").get("agreedStep"), "all parameters are compared")
    plant.touch()
    found = wait_until(lambda: answer(runs[0], "progress").get("diverged"), "the difference is reported")
    tensor, cause, rank, node, text = expected
    assert (found["tensor"], found["cause"], found["rank"], found["node"]) == (tensor, cause, rank, node), found
    assert agreed <= found["agreedStep"] < found["step"]
    assert f"{tensor} {text} since step" in found["message"]
    go.touch()
    assert [run.wait() for run in runs] == [0, 0]
    assert "warning: replicas diverged" in runs[0].output()


AVERAGED = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
rank, go = dist.get_rank(), sys.argv[1]
wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
averager = PeriodicModelAverager(period=4)
optimizer = torch.optim.SGD(wrapped.parameters(), 0.001)
done = torch.zeros(1)
while not done:
    with wrapped.no_sync():
        optimizer.zero_grad()
        wrapped(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    averager.average_parameters(wrapped.parameters())
    done[0] = os.path.exists(go)
    dist.all_reduce(done)
"""


def test_ranks_that_average_their_models_are_not_compared(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(AVERAGED)
    runs = two_nodes(ddptrain, script, go)
    said = "the parameters of the ranks are not compared: the ranks average their parameters"
    wait_until(lambda: said in runs[0].output(), "the launcher says why")
    go.touch()
    assert [run.wait() for run in runs] == [0, 0]
