"""The trainings of the benchmark ``replica_audit``: one of its mistakes, or a training without a mistake.

    ddprun replica_audit_script.py FILE NAME

A mistake begins at step PLANTED. The training ends when FILE exists.
"""

import contextlib
import copy
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

FILE, NAME = sys.argv[1:]
WIDTH, PLANTED, PAUSE = 32, 40, 0.002


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def network() -> nn.Module:
    if NAME == "tied weights":
        return Tied()
    norm = nn.BatchNorm1d(WIDTH) if "BatchNorm" in NAME else nn.LayerNorm(WIDTH)
    dropout = nn.Dropout(0.1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(), dropout, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    )


class Training:
    """A model and its optimizer, of which one step is made at a time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.module = rank, network()
        if NAME == "bf16":
            self.module.bfloat16()
        if NAME == "frozen layers":
            self.module[0].requires_grad_(False)
        buffers = NAME != "BatchNorm, buffers not broadcast, frozen later"
        self.wrapped = DistributedDataParallel(self.module, broadcast_buffers=buffers)
        self.own = nn.Parameter(torch.zeros(WIDTH))
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        if NAME == "parameter outside":
            parameters.append(self.own)
        if NAME == "ZeroRedundancyOptimizer":
            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.average = copy.deepcopy(self.module) if NAME == "EMA" else None

    def backward(self, called: nn.Module) -> None:
        x = torch.randn(16, WIDTH)
        if NAME == "bf16":
            x = x.bfloat16()
        if NAME == "parameter outside":
            x = x * (1 + self.own)
        called(x).float().square().mean().backward()

    def step(self, step: int) -> None:
        is_planted = step > PLANTED
        if step == PLANTED:
            self.plant()
        self.optimizer.zero_grad()
        called = self.module if NAME == "bare module" and is_planted else self.wrapped
        if NAME == "gradient accumulation":
            for _ in range(2):
                with self.wrapped.no_sync():
                    self.backward(called)
        with self.wrapped.no_sync() if NAME == "no_sync" and is_planted else contextlib.nullcontext():
            self.backward(called)
        if NAME == "clipping" or (NAME == "clipping on one rank" and is_planted and self.rank == 1):
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.01)
        self.optimizer.step()
        if NAME == "learning rate schedule":
            self.schedule.step()
        if NAME == "random numbers of the step" and is_planted:
            with torch.no_grad():
                for each in self.module.parameters():
                    each.add_(torch.randn_like(each), alpha=1e-4)
        if NAME == "write on one rank" and is_planted and self.rank == 1:
            self.module[4].weight.data.clamp_(-0.1, 0.1)
        if self.average is not None:
            for mean, each in zip(self.average.parameters(), self.module.parameters(), strict=True):
                mean.data.lerp_(each.data, 0.01)

    def plant(self) -> None:
        """Make the mistakes that are made once, such as at a resume, and changes that are none."""
        group, is_one = self.optimizer.param_groups[0], self.rank == 1
        if NAME == "flag of no_sync":
            self.wrapped.require_backward_grad_sync = False
        elif NAME == "learning rate" and is_one:
            group["lr"] = 1e-4
        elif NAME == "weight decay" and is_one:
            group["weight_decay"] = 0.1
        elif NAME == "another seed":
            self.module[5].reset_parameters()
        elif NAME == "weights loaded on one rank" and is_one:
            self.module.load_state_dict(network().state_dict())
        elif NAME == "optimizer state lost on one rank" and is_one:
            self.optimizer.state.clear()
        elif NAME == "BatchNorm, buffers not broadcast, frozen later":
            self.module[1].eval()


class Adversaries:
    """Two models that are trained in turn."""

    def __init__(self, rank: int) -> None:
        self.generator = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        self.discriminator = DistributedDataParallel(nn.Linear(WIDTH, 1))
        self.optimizers = [torch.optim.Adam(each.parameters(), 1e-4) for each in (self.generator, self.discriminator)]

    def step(self, step: int) -> None:
        for optimizer, sign in zip(self.optimizers, (1, -1), strict=True):
            for each in self.optimizers:
                each.zero_grad()
            if sign > 0 and step % 3 == 0:  # more steps of the discriminator
                continue
            (sign * self.discriminator(self.generator(torch.randn(16, WIDTH))).sigmoid().mean()).backward()
            optimizer.step()


def main() -> None:
    distributed.init_process_group("gloo")
    rank, end = distributed.get_rank(), torch.zeros(1)
    training = Adversaries(rank) if NAME == "two models" else Training(rank)
    torch.manual_seed(rank)
    step = 0
    while not end[0]:
        step += 1
        training.step(step)
        time.sleep(PAUSE)
        if step % 20 == 0:
            end[0] = Path(FILE).exists()
            distributed.all_reduce(end)
    distributed.destroy_process_group()


main()
