"""Gradient synchronization: resources that it must release."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddptrain.config import Config
from ddptrain.inference import alone
from ddptrain.training import models
from ddptrain.training.gradient_sync import Ddp


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
