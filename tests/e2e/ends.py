"""An ordinary DDP script, all of it in a function that destroys the process group before the model (decision 0055).

It trains three epochs, and more until the file UNTIL is there. Each step of the last rank takes SLOW seconds more.
"""

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank, until = dist.get_rank(), Path(os.environ.get("UNTIL", "/"))
    pause = float(os.environ.get("SLOW", "0")) if rank == dist.get_world_size() - 1 else 0.0
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4000, 20), torch.randint(0, 10, (4000,)))
    sampler: DistributedSampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in itertools.count():
        over = torch.tensor(epoch >= 3 and until.exists())
        dist.broadcast(over, 0)
        if over:
            break
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            time.sleep(pause)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} has made {epoch * len(loader)} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
