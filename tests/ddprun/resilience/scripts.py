"""A training as users write it, and how the tests of ``ddprun`` run scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.ddptrain.runs import ForkServer, Run
from tests.processes import free_port

STEPS = 8
TRAINING = f"""
import os, sys, time
import torch
import torch.distributed as dist

def fail(fault):
    if fault == "raise":
        raise ValueError("sample 17 has 3 channels, expected 1")
    if fault == "exit":
        sys.exit(3)
    if fault == "leave":
        os._exit(0)
    if fault == "return":
        sys.exit(0)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "hang":
        time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, {STEPS} + 1):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if len(sys.argv) > 2 and (step, rank) == (5, int(sys.argv[2])):
        fail(sys.argv[1])
print("rank", rank, "of", dist.get_world_size(), os.environ["TORCHELASTIC_RUN_ID"], __name__, sys.argv[1:])
dist.destroy_process_group()
"""


def written(folder: Path, text: str = TRAINING) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), start=1) if text in line)


def run(server: ForkServer, *argv: object, code: int = 0, first: str = "", **env: object) -> Run:
    return server.run(*argv, code=code, env=env, module="ddprun", first=first)


def two_nodes(
    server: ForkServer,
    *argv: object,
    ranks: int = 1,
    env: Mapping[str, object] = {},
    flags: tuple[tuple[object, ...], ...] = ((), ()),
    own: tuple[Mapping[str, object], ...] = ({}, {}),
) -> list[Run]:
    """Start the launchers of two nodes on this machine; ``flags`` and ``own`` are of each node."""
    port = free_port()
    common: dict[str, object] = {
        "PET_NNODES": 2, "PET_NPROC_PER_NODE": ranks, "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": free_port(),
        "DDPJOB_PROGRESS_PORT": port, **env,
    }  # fmt: skip
    runs = []
    for node in (0, 1):
        of_node = common | {"PET_NODE_RANK": node} | dict(own[node])
        runs.append(server.start(*flags[node], *argv, env=of_node, module="ddprun"))
        runs[-1].progress_port = port
    return runs
