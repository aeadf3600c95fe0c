"""Gradient synchronization: micro-batches and unused parameters on three ranks, and resources that it must release."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddprun.distributed.process_group import Group, alone
from ddprun.distributed.topology import Ranks
from ddprun.heartbeat import Heartbeat
from ddprun.signals import StopFlag
from ddptrain.config import Config
from ddptrain.data.batches import GlobalBatch
from ddptrain.training import models
from ddptrain.training.gradient_sync import Bucketed, Ddp, GradientSync, Manual
from tests.ddptrain.runs import ForkServer


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_close_destroys_ddp_before_the_process_group() -> None:
    group = alone(torch.device("cpu"))
    ddp = Ddp(models.build(Config(), group.device), group, accum=1, bf16=False)
    [wrapped] = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
    ddp.close()
    assert wrapped() is None, "its destructor, run later, could hang"


COUNT, WORLD = 37, 3  # samples, ranks: the parts of a batch differ in size, and the order of three numbers in their sum
DOUBLE = Config(dtype="float64")
CPU = torch.device("cpu")


class WithUnused(nn.Module):
    """A model whose first or last parameter the loss does not depend on, so that its gradient hook is never called."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        unused = nn.ParameterList([torch.ones(5, dtype=torch.float64)])
        parts = {"unused": unused, "used": models.build(DOUBLE, CPU)}
        self.parts = nn.ModuleDict(parts if first else dict(reversed(parts.items())))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.parts["used"](images)
        return output


def batch() -> GlobalBatch:
    numbers = torch.Generator().manual_seed(1)
    images = torch.randn(COUNT, 1, 28, 28, dtype=torch.float64, generator=numbers)
    labels = torch.randint(0, 10, (COUNT,), generator=numbers)
    return GlobalBatch(COUNT, lambda part: (images[part], labels[part]))


def check_step(kind: Callable[..., GradientSync], model: nn.Module, group: Group, accum: int) -> int:
    """Compare two steps with plain autograd over the whole batch; return the number of collectives they took."""
    before = collectives()
    (images, labels), parameters = batch().piece(slice(0, COUNT)), list(model.parameters())
    mean = functional.cross_entropy(model(images), labels)
    wanted = torch.autograd.grad(mean, parameters, allow_unused=True)
    sync = kind(model, group, accum=accum, bf16=False)
    steps: list[list[torch.Tensor]] = []
    for stop in (False, True):  # the second step must not contain the first one's gradient
        sync.clear()
        loss, stops, seconds = sync.step(batch(), stop and group.rank == WORLD - 1, 0.5).tolist()
        assert (stops, seconds) == (stop, 0.5 * WORLD)
        assert loss == pytest.approx(COUNT * mean.item())
        steps.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
        for got, gradient in zip(steps[-1], wanted, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if gradient is None else gradient, rtol=0, atol=1e-12)
    assert all(map(torch.equal, *steps)), "a run that resumes with the second step would have other bits"
    sync.close()
    return collectives() - before


def collectives() -> int:
    assert dist.group.WORLD is not None
    return int(dist.group.WORLD._get_sequence_number_for_group())


def run_rank(rank: int, meeting: str) -> None:
    """Check every way to synchronize on one of the ranks, which is this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    group = Group(Ranks(rank=rank, world_size=WORLD), CPU, None, StopFlag(), Heartbeat())
    for kind in (Manual, Ddp, Bucketed):
        counts = {check_step(kind, models.build(DOUBLE, CPU), group, accum) for accum in (1, 3, 5)}
        assert len(counts) == 1, f"{kind.__name__} exchanges each micro-batch"
    for kind, first in itertools.product((Manual, Bucketed), (True, False)):
        # Our models have no unused parameter, so DDP is not told to look for one.
        check_step(kind, WithUnused(first=first), group, accum=2)
    dist.destroy_process_group()


def test_gradients_of_several_ranks_in_micro_batches_equal_those_of_one_process(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    ranks = [ddptrain.start(rank, tmp_path / "meeting", module=__name__) for rank in range(WORLD)]
    assert [rank.wait() for rank in ranks] == [0] * WORLD, "".join(rank.output() for rank in ranks)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
