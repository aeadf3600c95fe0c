"""The variables that torchrun sets for every worker, and how they follow from one another.

    torchrun --nproc-per-node 2 env.py

A node is a machine or a pod. A worker is one process of the training, and all of them are the worker group. The workers
of one node are its local worker group. docs/concepts/torch-distributed/glossary.md explains each word and variable.
"""

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist

WORKER_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def main() -> None:
    variables = {name: os.environ[name] for name in WORKER_VARIABLES if name in os.environ}
    numbers = {name: int(value) for name, value in variables.items() if value.isdecimal()}
    of_one_worker(numbers)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    workers = of_all_ranks(variables)
    assert dist.get_rank() == numbers["RANK"]
    assert dist.get_world_size() == numbers["WORLD_SIZE"]
    of_all_workers(workers, numbers)
    if dist.get_rank() == 0:
        print(table(workers), flush=True)
    dist.destroy_process_group()


def of_all_ranks(variables: dict[str, str]) -> list[dict[str, str]]:
    """Return the variables of each rank: as bytes in tensors, because all_gather_object needs NumPy."""
    mine = torch.frombuffer(bytearray(json.dumps(variables).encode().ljust(2000)), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [json.loads(bytes(content.tolist())) for content in every]


def of_one_worker(v: dict[str, int]) -> None:
    """Check what holds in every worker, if each node has the same number of workers and all have one role."""
    assert v["RANK"] == v["GROUP_RANK"] * v["LOCAL_WORLD_SIZE"] + v["LOCAL_RANK"]
    assert v["WORLD_SIZE"] == v["GROUP_WORLD_SIZE"] * v["LOCAL_WORLD_SIZE"]
    assert 0 <= v["LOCAL_RANK"] < v["LOCAL_WORLD_SIZE"]
    assert 0 <= v["GROUP_RANK"] < v["GROUP_WORLD_SIZE"]
    assert (v["ROLE_RANK"], v["ROLE_WORLD_SIZE"]) == (v["RANK"], v["WORLD_SIZE"])
    assert v["TORCHELASTIC_RESTART_COUNT"] <= v["TORCHELASTIC_MAX_RESTARTS"]


def of_all_workers(workers: list[dict[str, str]], mine: dict[str, int]) -> None:
    """Check what holds between workers."""
    assert [int(worker["RANK"]) for worker in workers] == list(range(mine["WORLD_SIZE"]))
    local_group = [worker for worker in workers if int(worker["GROUP_RANK"]) == mine["GROUP_RANK"]]
    assert [int(worker["LOCAL_RANK"]) for worker in local_group] == list(range(mine["LOCAL_WORLD_SIZE"]))
    own = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    for name in workers[0].keys() - own:
        assert len({worker[name] for worker in workers}) == 1, f"{name} is not the same for all workers"


def table(workers: list[dict[str, str]]) -> str:
    """Return one row per variable and one column per worker."""
    first, *_ = widths = [max(map(len, WORKER_VARIABLES)), *(max(map(len, w.values())) for w in workers)]
    rows = ["worker".ljust(first) + "".join(f"  {rank:<{width}}" for rank, width in enumerate(widths[1:]))]
    for name in workers[0]:
        values = "".join(f"  {worker[name]:<{width}}" for worker, width in zip(workers, widths[1:], strict=True))
        rows.append(name.ljust(first) + values)
    return "\n".join(row.rstrip() for row in rows)


if __name__ == "__main__":
    main()
