"""The training of the benchmark ``slow_ranks``: one rank sleeps in one part of each step, as a file says.

    ddprun slow_ranks_script.py FILE WIDTH

The file holds JSON: ``{"rank": 1, "part": "backward", "seconds": 0.02}``, or ``{"end": true}``. In the part
"throttled" the rank has a cgroup (v1) with so many seconds of CPU in each second.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

FILE, WIDTH = Path(sys.argv[1]), int(sys.argv[2])
BATCH, LOOK = 32, 0.2
rank = int(os.environ["RANK"])
now: dict = {}
looked = 0.0
CPU = Path("/sys/fs/cgroup/cpu")


def look() -> None:
    """Read what is to be slow now."""
    global now, looked
    if time.monotonic() - looked > LOOK:
        looked, now = time.monotonic(), json.loads(FILE.read_text())
        limit_cpu(now["seconds"] if now.get("part") == "throttled" and now["rank"] == rank else None)


def limit_cpu(seconds: float | None) -> None:
    """Let this process run so many seconds of each second; None for no limit."""
    group = CPU / f"ddprun-slow-ranks-{os.getpid()}"
    if seconds and not group.is_dir():
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * seconds)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    elif not seconds and group.is_dir():
        (CPU / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def sleep(part: str) -> None:
    """Sleep if this rank is to be slow in this part."""
    if now.get("part") == part and now.get("rank") == rank:
        time.sleep(now["seconds"])


class Samples(Dataset):
    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            sleep("data")
        return torch.randn(WIDTH)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        sleep("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleep("backward")
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(SlowBackward.apply(self.first(x)))


def exchange(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sleep before the exchange of a bucket."""
    sleep("communication")
    return allreduce_hook(state, bucket)


def main() -> None:
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Model())
    model.register_comm_hook(None, exchange)
    optimizer, end = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(1)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=BATCH)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sleep("script")
        optimizer.step()
        look()
        if step % 20 == 0:
            end[0] = float("end" in now)
            distributed.all_reduce(end)
            if end[0] > 0:
                limit_cpu(None)
                break
    distributed.destroy_process_group()


main()
