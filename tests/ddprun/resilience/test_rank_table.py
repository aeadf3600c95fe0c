"""The rows of all ranks of two nodes, from the port of node 0, and the rank for which the others wait in each step."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.ddprun.resilience.scripts import two_nodes
from tests.ddptrain.runs import ForkServer, Run, wait_until

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
rank, go = dist.get_rank(), sys.argv[1]

class Samples(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.05 if rank == 3 else 0.0001)
        return torch.ones(4)

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step, batch in enumerate(DataLoader(Samples(), batch_size=2)):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    done = torch.tensor([float(os.path.exists(go))])
    dist.all_reduce(done)
    if done:
        break
"""


def answer(run: Run, path: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{run.progress_port}/{path}", timeout=2) as found:
            return dict(json.load(found))
    except OSError:
        return {}


def test_node_zero_shows_the_pace_and_the_memory_of_all_ranks_and_which_of_them_is_slow(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    runs = two_nodes(ddptrain, script, go, ranks=2)

    def all_paces() -> dict[str, Any] | None:
        assert not runs[0].ended, runs[0].output()
        seen = answer(runs[0], "ranks")
        rows = seen.get("ranks", [])
        known = all(row["stepSeconds"] and row["dataWaitSeconds"] and row["parts"] for row in rows)
        return seen if len(rows) == 4 and known else None

    seen = wait_until(all_paces, "the rows of all ranks")
    rows = seen["ranks"]
    assert [(row["rank"], row["node"]) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert (seen["worldSize"], seen["missingNodes"], seen["omittedRanks"]) == (4, [], 0)
    assert rows[3]["dataWaitSeconds"] >= 0.1 > max(row["dataWaitSeconds"] for row in rows[:3]), rows
    assert all(row["memoryBytes"] > 2**24 and row["step"] > 0 and row["phase"] == "train" for row in rows)
    assert all(row["stepSeconds"] >= 0.1 for row in rows), "all ranks wait for the slowest"
    assert rows[3]["parts"]["wait"] < min(row["parts"]["wait"] for row in rows[:3]), rows
    slow = wait_until(lambda: answer(runs[0], "progress").get("slow"), "the slow rank is named")
    assert (slow["rank"], slow["node"], slow["part"]) == (3, 1, "data")
    assert 0.05 < slow["seconds"] <= slow["stepSeconds"]
    go.touch()
    assert [run.wait() for run in runs] == [0, 0]
    assert "warning: slow: the other ranks wait" in runs[0].output()
